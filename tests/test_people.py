"""The gate in the whole program: training, rendering, export, merge and resize of people who agreed, did not, or not any more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from registry_support import NEAR, NOW, SUBJECT, Registry, grant_of
from run_support import outsize, site_of, train_here, write_pictures, write_recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from text_run_support import write_text_recipe
from tiny import write_tiny

from outsize.app.adapter_files import read_adapter
from outsize.app.contents import stated_subjects, tensors_digest
from outsize.app.export import export_run, give, trained_adapter
from outsize.app.merge import Order, merge
from outsize.app.render import Shot, render, settings_of
from outsize.app.resize import Target, resize_file
from outsize.app.tasks.protocol import Ask, task_of
from outsize.app.train import train
from outsize.base.errors import ConsentMissing
from outsize.base.journal import read_journal
from outsize.cli.main import main
from outsize.recipes.load import load_recipe
from outsize.registry.acts import add_party, add_subject, give_grant, revoke
from outsize.registry.ledger import Ledger
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder

PEOPLE = {"subjects": [SUBJECT], "requester": NEAR}
FOREVER = 4_000_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model"))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry where the program looks for it, with a subject and who asks, and no grant."""
    folder = tmp_path / "registry"
    monkeypatch.setenv("OUTSIZE_REGISTRY", str(folder))
    ledger = Ledger(folder)
    add_subject(ledger, "consent", SUBJECT)
    add_party(ledger, NEAR)
    return Registry(folder)


def agree(registry: Registry, **changes: Any) -> None:
    give_grant(Ledger(registry.folder), grant_of(**{"starts": NOW, "ends": FOREVER} | changes))


def recipe_of(tmp_path: Path, model: Path, **changes: Any) -> Path:
    write_pictures(tmp_path / "pictures", 2)
    train_for = {"train": {"steps": 2}, "checkpoints": {"every": 1}}
    return write_recipe(tmp_path, model=model, **{"people": PEOPLE, **train_for, **changes})


def events(run: RunFolder, name: str) -> list[dict[str, Any]]:
    return [one for one in read_journal(run.journal) if one["event"] == name]


def kinds(registry: Registry) -> list[tuple[str, str, str]]:
    """Decisions in order: purpose, stage, code."""
    chain, faults = Ledger(registry.folder).examined()
    assert not faults
    bodies = [one.body for one in chain.entries if one.kind == "decision"]
    return [(one["purpose"], one["stage"], one["code"]) for one in bodies]


def order_into(folder: Path) -> Order:
    return Order(
        into=folder,
        packed=None,
        shard_bytes=10**9,
        device=torch.device("cpu"),
        offline=True,
        told={},
    )


# --- training ------------------------------------------------------------------------------------


def test_nothing_is_read_or_trained_before_there_is_a_grant(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, model)
    with pytest.raises(ConsentMissing) as caught:
        train_here(recipe)
    assert caught.value.codes == ("no_grant",)
    run = RunFolder(load_recipe(recipe).run_folder())
    state = json.loads((run.path / "state.json").read_text())
    assert (state["state"], state["error"]) == ("failed", "ConsentMissing")
    assert "[no_grant]" in state["message"]
    assert not run.checkpoints.exists()
    assert not events(run, "cached"), "no picture was encoded"
    assert kinds(registry) == [("train", "request", "no_grant")]


def test_a_training_asks_at_the_start_at_each_checkpoint_and_at_the_end(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    """What it makes is bound: the run, the latents, each checkpoint by what it holds."""
    agree(registry, purposes=("train",))
    recipe = recipe_of(tmp_path, model)
    trained, run = train_here(recipe)
    assert trained.outcome == "completed"
    assert [stage for _, stage, code in kinds(registry) if code == "granted"] == [
        "request",  # to begin
        "release",  # the run is bound
        "release",  # and the cache
        "request",  # step 1
        "request",  # step 2
        "release",  # the end
    ]
    standing = registry.gate.standing()
    assert [one.kind for one in standing.derived] == ["run", "cache", "checkpoint", "checkpoint"]
    latents = next(one for one in standing.derived if one.kind == "cache")
    assert len(latents.items) >= 2
    assert all(Path(one.path).is_file() for one in latents.items)
    stolen = tmp_path / "elsewhere" / "renamed.safetensors"
    stolen.parent.mkdir()
    shutil.copy(all_checkpoints(run.checkpoints)[0] / "adapter.safetensors", stolen)
    assert standing.shown_in(tensors=[tensors_digest(stolen)]) == {SUBJECT}


def test_a_revocation_while_training_ends_it_at_the_next_checkpoint_and_nothing_stays(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    agree(registry)
    recipe = recipe_of(tmp_path, model, train={"steps": 4})
    seen = []

    def watch(report: Any) -> None:
        seen.append(report.step)
        if report.step == 2:
            revoke(Ledger(registry.folder), SUBJECT)

    with site_of(recipe) as (site, run), pytest.raises(ConsentMissing) as caught:
        train(site, run, watch)
    assert caught.value.codes == ("revoked",)
    assert seen == [1, 2], "it did not train on"
    assert run.state == "failed"
    assert not run.checkpoints.exists()
    assert (run.path / "checkpoints.quarantined" / "00000001").is_dir()
    for people in (PEOPLE, {"subjects": [], "requester": NEAR}):
        with pytest.raises(ConsentMissing):  # its place stays bound, whatever a recipe says by then
            train_here(recipe_of(tmp_path, model, people=people))


def test_a_revocation_while_pictures_are_encoded_puts_their_latents_away(
    registry: Registry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are bound although nobody allows what they were made for."""
    import outsize.app.encode as module

    agree(registry)
    recipe = recipe_of(tmp_path, model)
    encode = module.cache_latents

    def revoked_meanwhile(*args: Any, **options: Any) -> Any:
        result = encode(*args, **options)
        revoke(Ledger(registry.folder), SUBJECT)
        return result

    monkeypatch.setattr(module, "cache_latents", revoked_meanwhile)
    with pytest.raises(ConsentMissing):
        train_here(recipe)
    latents = next(one for one in registry.gate.standing().derived if one.kind == "cache").items
    assert len(latents) >= 2
    assert not [one.path for one in latents if Path(one.path).exists()]
    assert all(Path(f"{one.path}.quarantined").is_file() for one in latents)


def test_a_term_that_runs_out_while_training_ends_it(
    registry: Registry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved before stays where it is, and cannot be used."""
    agree(registry)
    clock = {"now": NOW}
    recipe = recipe_of(tmp_path, model, train={"steps": 4})
    real = Ledger.now

    def later(ledger: Ledger) -> int:
        return real(ledger) + clock["now"] - NOW

    monkeypatch.setattr(Ledger, "now", later)

    def watch(report: Any) -> None:
        if report.step == 3:
            clock["now"] = NOW + FOREVER

    with site_of(recipe) as (site, run), pytest.raises(ConsentMissing) as caught:
        train(site, run, watch)
    assert caught.value.codes == ("expired",)
    assert [one.name for one in all_checkpoints(run.checkpoints)] == ["00000002", "00000001"]


def test_work_that_shows_nobody_asks_nobody_and_says_so(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, model, people={"subjects": []})
    _, run = train_here(recipe)
    assert kinds(registry) == []
    (told,) = events(run, "people")
    assert told["subjects"] == []
    assert "nobody was asked" in told["note"]


def test_a_registry_that_was_altered_stops_work_that_might_show_somebody(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    """Whom a run shows can then not be told, so not even a recipe without subjects is trained."""
    path = Ledger(registry.folder).path
    path.write_bytes(path.read_bytes().replace(b"consent", b"licence"))
    with pytest.raises(ConsentMissing) as caught:
        train_here(recipe_of(tmp_path, model, people={"subjects": []}))
    assert caught.value.codes == ("store_broken",)


# --- what comes of it ----------------------------------------------------------------------------


@pytest.fixture
def trained(registry: Registry, model: Path, tmp_path: Path) -> tuple[Path, RunFolder]:
    """A run that was agreed to for everything."""
    agree(registry)
    recipe = recipe_of(tmp_path, model, compare={"steps": 1, "prompts": ["a red picture"]})
    return recipe, train_here(recipe)[1]


def test_no_function_of_ours_lets_anything_out_after_a_revocation(
    registry: Registry,
    trained: tuple[Path, RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Python interface as the command: files, weights and runs are refused wherever they lie by then."""
    path, run = trained
    recipe = load_recipe(path)
    exported = tmp_path / "out" / "adapter.safetensors"
    export_run(recipe, run, "diffusers", exported)
    held = trained_adapter(recipe, run)  # read while it was allowed
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy / "run")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(exported), bare)  # without metadata, under another name
    assert stated_subjects(exported) == (SUBJECT,)
    assert stated_subjects(bare) == ()
    told = revoke(Ledger(registry.folder), SUBJECT)
    moved = {one.path for one in told.quarantined if one.became == "moved"}
    assert {str(exported), str(run.checkpoints)} <= moved
    assert not exported.exists()

    moved_run = RunFolder(copy / "run")
    found = read_adapter(bare, "flux2", "tiny")
    assert found.weights.subjects == {SUBJECT}, "what it holds tells"
    monkeypatch.setenv("OUTSIZE_REQUESTER", NEAR)  # a file brings no recipe that says who asks
    order = order_into(tmp_path / "merged")
    without_people = recipe.model_copy(update={"people": type(recipe.people)(requester=NEAR)})
    acts: list[Callable[[], object]] = [
        lambda: export_run(without_people, moved_run, "peft", tmp_path / "a"),
        lambda: give(without_people, held, "peft", tmp_path / "b"),
        lambda: merge(without_people, found.weights, order),
        lambda: merge(without_people, held.weights, order),
        lambda: resize_file(bare, "flux2.tiny", Target(2, None, None, tmp_path / "c.safetensors")),
    ]
    for act in acts:
        with pytest.raises(ConsentMissing) as caught:
            act()
        assert caught.value.codes == ("revoked",)
    for name in ("a", "b", "merged", "c.safetensors"):
        assert not (tmp_path / name).exists()


def test_pictures_are_asked_for_before_the_model_opens_and_again_when_they_are_done(
    registry: Registry, trained: tuple[Path, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who revokes while they are drawn is heard: they are not given out."""
    recipe, _ = trained
    with site_of(recipe) as (site, run):
        shots, settings = [Shot("a red picture", 1)], settings_of(site)
        assert len(render(site, run, shots, settings, with_adapter=True)) == 1
        assert kinds(registry)[-2:] == [
            ("render", "request", "granted"),
            ("render", "release", "granted"),
        ]
        import outsize.app.render as module

        drawn = module.decode_latents

        def revoked_meanwhile(*args: Any, **options: Any) -> Any:
            result = list(drawn(*args, **options))
            with Ledger(registry.folder).opened() as opened:
                opened.append("revocation", {"subject": SUBJECT})
            return iter(result)

        monkeypatch.setattr(module, "decode_latents", revoked_meanwhile)
        with pytest.raises(ConsentMissing) as caught:
            render(site, run, shots, settings, with_adapter=True)
        assert caught.value.codes == ("revoked",)
        assert kinds(registry)[-1] == ("render", "release", "revoked")
        monkeypatch.setattr(module, "decode_latents", drawn)
        assert render(site, run, shots, settings, with_adapter=False), "the base shows nobody"


def test_an_export_is_not_there_when_it_is_revoked_before_it_is_let_out(
    registry: Registry, trained: tuple[Path, RunFolder], tmp_path: Path, monkeypatch: Any
) -> None:
    from outsize.export import export as module

    path, run = trained
    proven = module._proven

    def revoked_meanwhile(*args: Any) -> float:
        with Ledger(registry.folder).opened() as opened:
            opened.append("revocation", {"subject": SUBJECT})
        return float(proven(*args))

    monkeypatch.setattr(module, "_proven", revoked_meanwhile)
    target = tmp_path / "out" / "adapter.safetensors"
    with pytest.raises(ConsentMissing):
        export_run(load_recipe(path), run, "diffusers", target)
    assert list(target.parent.iterdir()) == []


def test_a_merged_base_shows_whom_its_adapter_shows(
    registry: Registry, trained: tuple[Path, RunFolder], model: Path, tmp_path: Path
) -> None:
    """By where it lies, and by its report where it was moved."""
    path, run = trained
    recipe = load_recipe(path)
    merge(recipe, trained_adapter(recipe, run).weights, order_into(tmp_path / "merged"))
    shutil.copytree(tmp_path / "merged", tmp_path / "moved")
    for part in model.iterdir():
        if part.name != "transformer" and part.is_dir():
            shutil.copytree(part, tmp_path / "moved" / part.name)
    revoke(Ledger(registry.folder), SUBJECT)
    assert (tmp_path / "merged.quarantined").is_dir()
    other = recipe_of(tmp_path / "other", tmp_path / "moved", people={"requester": NEAR})
    with pytest.raises(ConsentMissing) as caught:
        train_here(other)
    assert caught.value.codes == ("revoked",)


def test_previews_need_consent_to_be_rendered(
    registry: Registry, model: Path, tmp_path: Path
) -> None:
    agree(registry, purposes=("train",))
    recipe = recipe_of(tmp_path, model, previews={"every": 1, "prompts": ["a cat"], "steps": 1})
    with pytest.raises(ConsentMissing) as caught:
        train_here(recipe)
    assert caught.value.codes == ("purpose_not_granted",)


# --- the commands --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
def test_the_commands_from_the_first_grant_to_the_last_word(model: Path, tmp_path: Path) -> None:
    """As a person does it: denied, agreed, trained, sampled, exported; revoked, put away, denied; told in plain words."""
    recipe = recipe_of(tmp_path, model, compare={"steps": 1, "prompts": ["a red picture"]})
    sheet = tmp_path / "signed.txt"
    sheet.write_text("I agree", encoding="utf-8")
    denied = outsize("train", recipe)
    assert denied.returncode == 10, denied.stderr
    assert "ConsentMissing: there is no consent to train: [no_grant]" in denied.stderr
    given = outsize(
        "registry", "grant", SUBJECT, "--scope", "self", "--allow", f"self:{NEAR}", "--evidence", sheet,
        "--until", "2090-12-31", *(f"--purpose={one}" for one in ("train", "render", "export")),
    )  # fmt: skip
    assert given.returncode == 0, given.stderr
    for line in (
        ("train", recipe),
        ("sample", recipe, "--prompt", "a red picture"),
        ("export", recipe),
    ):
        done = outsize(*line)
        assert done.returncode == 0, done.stderr
    run = load_recipe(recipe).run_folder()
    (exported,) = (run / "export").glob("*.safetensors")
    with safe_open(exported, "pt") as file:
        assert file.metadata()["outsize.subjects"] == SUBJECT
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(exported), bare)
    merged = outsize("merge", recipe, "--into", tmp_path / "merged")
    assert merged.returncode == 10
    assert "[purpose_not_granted]" in merged.stderr

    head = outsize("registry", "head").stdout
    (tmp_path / "head.json").write_text(head, encoding="utf-8")
    revoked = json.loads(outsize("registry", "revoke", SUBJECT, "--json").stdout)
    moved = {Path(one["path"]).name for one in revoked["quarantined"] if one["became"] == "moved"}
    assert {"checkpoints", "samples", "export"} <= moved
    assert sum(name.endswith(".safetensors") for name in moved) >= 2, "the latents as well"
    assert not (run / "export").exists()
    for line in (
        ("train", recipe),
        ("sample", recipe, "--prompt", "a cat", "--adapter", bare),
        ("resize", bare, "--rank", "2", "--out", tmp_path / "small.safetensors"),
        ("merge", recipe, "--adapter", bare, "--into", tmp_path / "merged"),
    ):
        done = outsize(*line)
        assert done.returncode == 10, (line, done.stderr)
        assert "[revoked]" in done.stderr or "[requester_unknown]" in done.stderr
    again = outsize("registry", "revoke", SUBJECT)
    assert "had revoked already" in again.stdout

    checked = outsize("registry", "verify", "--head", tmp_path / "head.json")
    assert checked.returncode == 0, checked.stderr
    told = outsize("registry", "audit", SUBJECT).stdout
    for words in (
        "agreed to train, render and export, only for this person",
        f"{NEAR} asked to train, at the start: no, {SUBJECT} has agreed to nothing [no_grant]",
        "when the result was let out",
        "came of it: checkpoint",
        "revoked everything agreed to before",
        "things derived from this person were to be put away",
    ):
        assert words in told, told


@pytest.mark.usefixtures("registry")
def test_binding_a_file_afterwards_is_binding_it_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter of nobody knows whom becomes somebody's, wherever it lies then."""
    recipe = recipe_of(tmp_path, model, people={"requester": NEAR})
    _, run = train_here(recipe)
    for told in ("1 of 1 were", "0 of 1 were"):
        assert main(["registry", "bind", SUBJECT, str(run.path)]) == 0
        assert told in capsys.readouterr().out
    shutil.copytree(run.path, tmp_path / "moved")
    with pytest.raises(ConsentMissing) as caught:
        export_run(load_recipe(recipe), RunFolder(tmp_path / "moved"), "peft", tmp_path / "out")
    assert caught.value.codes == ("no_grant",)


def test_a_head_that_knows_more_and_a_ledger_that_was_edited_are_told_by_verify(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, head = Ledger(registry.folder), tmp_path / "head.json"
    assert main(["registry", "head", "--out", str(head)]) == 0
    whole, kept = ledger.path.read_bytes(), ledger.head_path.read_bytes()
    ledger.path.write_bytes(whole.splitlines(keepends=True)[0])
    ledger.head_path.unlink()
    assert main(["registry", "verify"]) == 0, "by itself it cannot be told"
    assert main(["registry", "verify", "--head", str(head)]) == 6
    assert "the end was cut off" in capsys.readouterr().err
    ledger.path.write_bytes(whole.replace(b"consent", b"licence"))
    ledger.head_path.write_bytes(kept)
    assert main(["registry", "verify", "--json"]) == 6
    told = json.loads(capsys.readouterr().out)
    assert told["faults"] == ["line 2 has another digest than its content: it was edited"]


# --- texts ---------------------------------------------------------------------------------------


def test_texts_are_asked_for_as_pictures_are(registry: Registry, tmp_path: Path) -> None:
    """The other task goes through a path of its own; it passes the same gate, at both ends."""
    agree(registry)
    recipe = write_text_recipe(
        tmp_path, train={"steps": 2}, checkpoints={"every": 2}, people=PEOPLE,
        previews={"every": 1, "prompts": ["a cat"]},
    )  # fmt: skip
    train_here(recipe)
    asks = [Ask("a red cat", 1)]
    with site_of(recipe) as (site, run):
        task = task_of(site.recipe)
        (made,) = task.sample(site, run, asks, with_adapter=True)
        assert made.path.exists()
        assert kinds(registry)[-2:] == [
            ("render", "request", "granted"),
            ("render", "release", "granted"),
        ]
        assert ("render", "request", "granted") in kinds(registry)[:-2], "previews ask as well"
        told = revoke(Ledger(registry.folder), SUBJECT)
        assert str(run.path / "samples") in {one.path for one in told.quarantined}
        shutil.copytree(run.path / "checkpoints.quarantined", run.checkpoints)
        with pytest.raises(ConsentMissing):
            list(task.sample(site, run, asks, with_adapter=True))
        with pytest.raises(ConsentMissing):
            task.compare(site, run)
        assert not list(run.path.glob("compare/*"))
        assert not list(run.path.glob("samples/*"))
        assert list(task.sample(site, run, asks, with_adapter=False)), "the base shows nobody"
