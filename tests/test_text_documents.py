"""Reading texts: files, columns, faults, the cache and the preview."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_support import GEMMA, LLAMA, chat_row, marked, plain, tokenizer_of, write_lines

from outsize.base.errors import SourceError
from outsize.data.cache import ContentCache
from outsize.data.documents import Documents, read_documents
from outsize.data.fitting import fit
from outsize.data.preview import previews
from outsize.data.text_files import find_files, split_of
from outsize.recipes.text import TextChoice, TextSet


def read(
    path: Path,
    *,
    template: str | None = plain(LLAMA),
    cache: ContentCache | None = None,
    **item: Any,
) -> Documents:
    choice = TextChoice(sets=(TextSet(path=path, **item),), window=256, held_out=0.0)
    return read_documents(choice, tokenizer_of(template), inputs={"files": "1"}, cache=cache)


def shown(documents: Documents) -> list[list[tuple[str, bool]]]:
    """Spans of all documents."""
    tokenizer = tokenizer_of(None)
    return [
        [(s.text, s.is_trained) for s in one.spans] for one in previews(documents, tokenizer, 99)
    ]


def turns(question: str, answer: str) -> list[tuple[str, bool]]:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return [
        ("<s>" + head.format("user") + question + "<|eot_id|>" + head.format("assistant"), False),
        (answer + "<|eot_id|>", True),
    ]


@pytest.mark.parametrize(
    ("row", "item"),
    [
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, {}),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, {}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": ["A"]}]}, {}),
        ({"prompt": "Q", "completion": "A"}, {}),
        ({"prompt": "Q", "response": "A"}, {}),
        ({"prompt": [{"role": "user", "content": "Q"}], "completion": [{"role": "assistant", "content": "A"}]}, {}),
        ({"instruction": "Q", "input": "", "output": "A"}, {"prompt": ["instruction", "input"], "completion": "output"}),
        ({"talk": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "text": "x"}, {"messages": "talk"}),
        ({"prompt": "x", "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, {}),
    ],
)  # fmt: skip
def test_every_way_to_write_a_conversation_gives_the_same_document(
    row: dict[str, Any], item: dict[str, Any], tmp_path: Path
) -> None:
    assert shown(read(write_lines(tmp_path / "a.jsonl", [row]), **item)) == [turns("Q", "A")]


def test_pairs_as_they_stand_train_the_completion_and_the_end_of_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "Say yes: ", "completion": "yes"}])
    made = read(path, template=None, as_chat=False)
    # A token that reaches over the border holds a character of the completion, and so it is trained.
    assert shown(made) == [[("Say yes:", False), (" yes</s>", True)]]
    everything = read(path, template=None, as_chat=False, train_on="everything")
    assert everything.files[0].trained.tolist() == [False] + [True] * (
        len(made.files[0].tokens) - 1
    )


def test_plain_text_is_trained_whole_between_one_beginning_and_one_end(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "yes and no"}, {"text": "<s>again</s>"}])
    choice = TextChoice(sets=(TextSet(path=path),), held_out=0.0)
    documents = read_documents(choice, tokenizer_of(None, sets_bos=True), inputs={})
    assert shown(documents) == [
        [("<s>", False), ("yes and no</s>", True)],
        [("<s>", False), ("again</s>", True)],
    ]
    (fitted,) = fit(documents)
    assert (fitted.facts.num_eos, fitted.facts.num_without_bos, fitted.facts.num_several_bos) == (
        2,
        0,
        0,
    )


def test_turns_of_weight_zero_are_context_only(tmp_path: Path) -> None:
    row = chat_row("Q", "A", "R", "B")
    row["messages"][1]["weight"] = 0
    (spans,) = shown(read(write_lines(tmp_path / "a.jsonl", [row])))
    assert [text for text, is_trained in spans if is_trained] == ["B<|eot_id|>"]


def test_all_faults_are_named_at_once_with_file_and_line_and_nothing_is_cached(
    tmp_path: Path,
) -> None:
    lines = [
        json.dumps(chat_row("q", "a")),
        '{"messages": [',
        "",
        json.dumps(chat_row("q", " ")),
        json.dumps({"messages": [{"role": "critic", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        json.dumps({"text": "x"}),
        json.dumps(chat_row("q")),
        "[1]",
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]}),
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    cache = ContentCache(tmp_path / "cache")
    with pytest.raises(SourceError) as caught:
        read(path, cache=cache)
    said = str(caught.value).splitlines()
    assert said[0] == "7 faults in the texts; nothing was started:"
    expected = {
        2: "is not JSON: ",
        4: "message 2 is an assistant turn without words",
        5: "the chat template does not know the role 'critic' of message 1",
        6: "has no column 'messages', as the rows before; it has text",
        7: "has no assistant turn, so there is nothing to learn (its roles: user)",
        8: "must be an object with columns, and is a list",
        9: "message 1 holds a part that is no text (image)",
    }
    for line, (number, text) in zip(said[1:], expected.items(), strict=True):
        assert line.startswith(f"  {path}: line {number}: {text}")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'{"text": "x"}', "must hold a list of samples, and holds an object"),
        ("a.json", b'[{"text": "x"},\n {"text" "y"}]', "line 2: is not JSON: Expecting ':' delimiter"),
        ("a.json", b'{"text": "x"}\n{"text": "y"}', "one object a line is .jsonl"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1: byte 11 of the line is not UTF-8"),
        ("a.jsonl", b'{"words": "x"}', "line 1: no known column among words"),
        ("a.jsonl", b'{"instruction": "x", "output": "y"}', "prompt: [instruction, input]"),
        ("a.jsonl", b'{"prompt": "", "completion": "y"}', "line 1: the prompt is empty"),
        ("a.jsonl", b'{"prompt": "x", "completion": " "}', "line 1: the completion is empty"),
        ("a.jsonl", b"", "holds no sample"),
        ("a.csv", b"x", "convert it to one of .jsonl"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_samples_is_refused_by_name(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    choice = TextSet.model_construct(
        **(TextSet(path=Path("x")).__dict__ | {"path": tmp_path / name})
    )
    with pytest.raises(SourceError) as caught:
        read_documents(TextChoice(sets=(choice,)), tokenizer_of(plain(LLAMA)), inputs={})
    assert str(tmp_path / name) in str(caught.value)
    assert said in str(caught.value)


def test_conversations_need_a_template_and_plain_texts_do_not(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no chat template"):
        read(write_lines(tmp_path / "a.jsonl", [chat_row("q", "a")]), template=None)
    assert shown(read(write_lines(tmp_path / "b.jsonl", [{"text": "yes"}]), template=None))


def test_nothing_trained_and_everything_trained_by_accident_are_refused(tmp_path: Path) -> None:
    silent = chat_row("q", "a")
    silent["messages"][1]["weight"] = 0
    with pytest.raises(SourceError, match=r"a\.jsonl: none of its \d+ tokens would be trained"):
        fit(read(write_lines(tmp_path / "a.jsonl", [silent])))
    whole = "{% generation %}" + plain(GEMMA).replace("{{ bos_token }}", "") + "{% endgeneration %}"
    path = write_lines(tmp_path / "b.jsonl", [chat_row("q", "a")])
    with pytest.raises(
        SourceError, match=r"all of its \d+ tokens would be trained, prompts as well"
    ):
        fit(read(path, template=whole))
    assert fit(read(path, template=whole, train_on="everything"))[0].facts.num_trained
    (facts,) = (one.facts for one in fit(read(path, template=marked(LLAMA))))
    assert 0 < facts.trained_share < 0.5


def test_a_text_that_holds_special_tokens_is_counted(tmp_path: Path) -> None:
    (fitted,) = fit(
        read(write_lines(tmp_path / "a.jsonl", [chat_row("q <s>", "a"), chat_row("q", "a")]))
    )
    (warning,) = fitted.facts.sentences(TextChoice(sets=(TextSet(path=Path("a")),), held_out=0.0))
    assert warning == "a.jsonl: 1 of 2 samples hold the beginning token more than once"


def test_a_cached_file_is_not_read_again_until_anything_that_shapes_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat_row("q", f"a {i}") for i in range(5)])
    cache = ContentCache(tmp_path / "cache")
    made = read(path, cache=cache)
    (entry,) = (tmp_path / "cache").rglob("*.safetensors")
    assert (made.num_reused, len(made.files[0].rows)) == (0, 5)
    for changed in ({"train_on": "last_turn"}, {"template": plain(GEMMA)}):
        assert read(path, cache=cache, **changed).num_reused == 0
    monkeypatch.setattr("outsize.data.documents.Tokenising.documents", None)
    again = read(path, cache=cache)
    assert again.num_reused == 1
    for name in ("tokens", "trained", "begins", "rows", "turns"):
        assert np.array_equal(getattr(again.files[0], name), getattr(made.files[0], name))
    monkeypatch.undo()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert read(path, cache=cache).num_reused == 0, "a torn entry is made anew"
    assert read(path, cache=cache).num_reused == 1


def test_spans_of_a_preview_put_together_are_the_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat_row("q\N{SNOWMAN} ", " a\n\nb \N{SNOWMAN}")])
    documents = read(path)
    (preview,) = previews(documents, tokenizer_of(None), 3)
    assert (preview.place, preview.num_tokens) == (
        f"{path}: line 1",
        len(documents.files[0].tokens),
    )
    assert preview.num_trained == documents.files[0].trained.sum()
    assert [(s.text, s.is_trained) for s in preview.spans] == turns(
        "q\N{SNOWMAN}", "a\n\nb \N{SNOWMAN}"
    )


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("data/test_sft-00000-of-00001-0a1b2c.parquet", "test_sft"),
        ("data/train_sft-00000-of-00003.parquet", "train_sft"),
        ("train/data-00000-of-00001.arrow", "train"),
        ("dev.jsonl", "validation"),
        ("my-eval.jsonl", "validation"),
        ("trainer.jsonl", None),
        ("data.jsonl", None),
    ],
)
def test_splits_are_read_off_names(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_a_dataset_folder_gives_the_files_of_one_split_in_order(tmp_path: Path) -> None:
    for name in (
        "b.train.jsonl",
        "a.train.jsonl",
        "test.jsonl",
        ".hidden.jsonl",
        "dataset_info.json",
    ):
        write_lines(tmp_path / name, [{"text": name}])
    (tmp_path / "README.md").write_text("x")
    assert [one.name for one in find_files(tmp_path, "train")] == ["a.train.jsonl", "b.train.jsonl"]
    assert [one.name for one in find_files(tmp_path, "test")] == ["test.jsonl"]
    with pytest.raises(SourceError, match="no split 'val'; set split to one of test, train"):
        find_files(tmp_path, "val")
    write_lines(tmp_path / "train.json", [])
    with pytest.raises(SourceError, match=r"several kinds \(\.json \.jsonl\)"):
        find_files(tmp_path, "train")
    with pytest.raises(SourceError, match="no such file or folder"):
        find_files(tmp_path / "none", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no file that is read"):
        find_files(tmp_path / "empty", "train")


def test_json_arrays_and_text_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": "yes"}, {"text": "no"}]), encoding="utf-8"
    )
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfyes\r\nno")
    texts = ["".join(text for text, _ in spans) for spans in shown(read(tmp_path / "a.json"))]
    assert texts == ["yes</s>", "no</s>"]
    (spans,) = shown(read(tmp_path / "a.txt"))
    assert "".join(text for text, _ in spans) == "yes\nno</s>"


def test_parquet_and_arrow_give_the_documents_of_json_lines(tmp_path: Path) -> None:
    """Both as datasets writes them: columns that a row lacks are null there, in messages too."""
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = [chat_row("Q", "A"), chat_row("R", "B", "S", "C")]
    rows[1]["messages"][1]["weight"] = 1
    expected = shown(read(write_lines(tmp_path / "a.jsonl", rows)))
    table = arrow.Table.from_pylist(rows)
    (tmp_path / "set" / "data").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    shard = tmp_path / "saved" / "train" / "data-00000-of-00001.arrow"
    with arrow.OSFile(str(shard), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with (
        arrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        arrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    for path in (tmp_path / "set", tmp_path / "saved", tmp_path / "b.arrow"):
        assert shown(read(path)) == expected
    shard.write_bytes(b"nonsense")
    with pytest.raises(SourceError, match="is no arrow file that can be read"):
        read(tmp_path / "saved")
    (tmp_path / "c.parquet").write_bytes(b"nonsense")
    with pytest.raises(SourceError, match="is no parquet file that can be read"):
        read(tmp_path / "c.parquet")


def test_parquet_without_pyarrow_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("outsize.data.text_files.importlib.import_module", missing)
    with pytest.raises(
        SourceError, match=r"a\.parquet: reading it needs pyarrow.*pip install pyarrow"
    ):
        read(tmp_path / "a.parquet")
