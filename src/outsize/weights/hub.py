"""Weights and folders out of the hub's cache, and into it; the only file that speaks to the hub.

Weights are looked for by the cache's documented layout (refs/REVISION names the commit, snapshots/COMMIT holds the files),
so a warm start asks nothing of the network and does not import the client. Whatever is taken out of the cache is what
was chosen from the repository's own listing: exact names, never a wildcard over weights.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from outsize.base.errors import SourceError
from outsize.weights.choice import HubId, choose, files_of_index, weights_in_folder

_Result = TypeVar("_Result")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG = "config.json"  # at the root: the repository is one model, not a pipeline


def hub_weights(
    hub_id: HubId, sub_folder: str, *, offline: bool, cache_dir: Path | None
) -> tuple[Path, ...]:
    """The weights of one model, downloaded when they are not in the cache.

    Raises: SourceError for what is missing offline, gated, unknown, or not to be chosen plainly.
    """
    try:
        return _weights_in_snapshot(_cached_snapshot(hub_id, cache_dir), hub_id, sub_folder)
    except SourceError as fault:
        if _is_offline(offline=offline):
            wanted = hub_id.file or (f"{sub_folder}/*" if sub_folder else "*.safetensors")
            raise SourceError(_offline_message(hub_id, wanted, str(fault))) from fault
    return asking(hub_id, lambda: _download_weights(hub_id, sub_folder, cache_dir))


def hub_folder(
    hub_id: HubId,
    sub_folder: str,
    patterns: Sequence[str],
    *,
    offline: bool,
    cache_dir: Path | None,
) -> Path:
    """A small folder (tokenizer, scheduler) of a repository, downloaded when the cache does not hold all of it.

    Raises: SourceError as `hub_weights` does.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch(*, is_local: bool) -> Path:
        root = snapshot_download(
            hub_id.repo,
            revision=hub_id.revision,
            allow_patterns=list(patterns),
            local_files_only=is_local,
            cache_dir=cache_dir,
        )
        folder = Path(root) / sub_folder
        if not folder.is_dir() or not any(folder.iterdir()):
            raise SourceError(f"{hub_id.repo} has no folder {sub_folder!r}")
        return folder

    try:
        return fetch(is_local=True)
    except (LocalEntryNotFoundError, SourceError) as fault:
        if _is_offline(offline=offline):
            message = _offline_message(hub_id, f"{sub_folder}/*", str(fault).splitlines()[0])
            raise SourceError(message) from fault
    return asking(hub_id, lambda: fetch(is_local=False))


def asking(hub_id: HubId, action: Callable[[], _Result]) -> _Result:
    """Run something that asks the hub; its errors become SourceError with the remedy."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{hub_id.repo}"
    try:
        return action()
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{hub_id.repo} is gated: accept its licence at {page} with your account, then run "
            "`hf auth login` here, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{hub_id.repo} has no revision {hub_id.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{hub_id.repo} is no folder here, and the hub has no such repository, or your account may "
            f"not see it: check the name, "
            f"or accept its licence at {page} and run `hf auth login`"
        ) from error
    except _transport_errors() as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{hub_id.repo} could not be fetched from the hub ({first_line}); what was downloaded is "
            "kept: start again to continue"
        ) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """All that can go wrong on the way.

    HfHubHTTPError derives from its HTTP client's own base error, which differs between releases of the hub's library,
    and from OSError.
    """
    from huggingface_hub.errors import HfHubHTTPError

    bases = HfHubHTTPError.__bases__
    return tuple(base for base in bases if issubclass(base, Exception))


def _weights_in_snapshot(snapshot: Path, hub_id: HubId, sub_folder: str) -> tuple[Path, ...]:
    if hub_id.file is not None:
        file = snapshot / hub_id.file
        if not file.is_file():
            raise SourceError(f"{hub_id.file} is not in the hub's cache")
        return (file,)
    if not sub_folder or (snapshot / sub_folder).is_dir():
        return weights_in_folder(snapshot / sub_folder)
    if (snapshot / _CONFIG).is_file():
        return weights_in_folder(snapshot)
    raise SourceError(f"{sub_folder} is not in the hub's cache")


def _download_weights(hub_id: HubId, sub_folder: str, cache_dir: Path | None) -> tuple[Path, ...]:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    info = HfApi().model_info(hub_id.repo, revision=hub_id.revision)
    commit = info.sha or hub_id.revision
    names = [sibling.rfilename for sibling in info.siblings or ()]
    extra: list[str] = []
    if hub_id.file is not None:
        if hub_id.file not in names:
            raise SourceError(f"{hub_id.repo} has no file {hub_id.file}")
        wanted = [hub_id.file]
    else:
        folder = _folder_in_listing(names, hub_id, sub_folder)
        start = f"{folder}/" if folder else ""
        inside = [name.removeprefix(start) for name in names if name.startswith(start)]
        choice = choose([name for name in inside if "/" not in name], f"{hub_id.repo}/{folder}")
        files = choice.files
        if choice.index is not None:
            name = start + choice.index
            index = hf_hub_download(hub_id.repo, name, revision=commit, cache_dir=cache_dir)
            files = files_of_index(Path(index).read_bytes(), f"{hub_id.repo}/{name}")
            extra.append(name)
        wanted = [start + name for name in files]
        extra += [name for name in (start + _CONFIG,) if name in names]
    # Asked by name of the revision, so that the cache notes which commit that revision is.
    root = snapshot_download(
        hub_id.repo,
        revision=hub_id.revision,
        allow_patterns=[glob.escape(name) for name in (*wanted, *extra)],
        cache_dir=cache_dir,
    )
    missing = [name for name in wanted if not (Path(root) / name).is_file()]
    if missing:
        raise SourceError(f"{hub_id.repo} lacks files that its index names: {', '.join(missing)}")
    return tuple(Path(root) / name for name in wanted)


def _folder_in_listing(names: Sequence[str], hub_id: HubId, sub_folder: str) -> str:
    if not sub_folder or any(name.startswith(f"{sub_folder}/") for name in names):
        return sub_folder
    if _CONFIG in names:
        return ""
    raise SourceError(f"{hub_id.repo} has no folder {sub_folder!r}")


def _cached_snapshot(hub_id: HubId, cache_dir: Path | None) -> Path:
    """The snapshot folder of a revision in the hub's cache.

    Raises: SourceError when there is none.
    """
    from huggingface_hub import constants

    cache = cache_dir if cache_dir is not None else Path(constants.HF_HUB_CACHE)
    repo = cache / f"models--{hub_id.repo.replace('/', '--')}"
    commit = hub_id.revision
    reference = repo / "refs" / hub_id.revision
    if _COMMIT.fullmatch(commit) is None:
        if not reference.is_file():
            raise SourceError("it is not in the hub's cache")
        commit = reference.read_text().strip()
    snapshot = repo / "snapshots" / commit
    if not snapshot.is_dir():
        raise SourceError("it is not in the hub's cache")
    return snapshot


def _is_offline(*, offline: bool) -> bool:
    from huggingface_hub import constants

    return offline or constants.HF_HUB_OFFLINE


def _offline_message(hub_id: HubId, wanted: str, fault: str) -> str:
    revision = "" if hub_id.revision == "main" else f" --revision {hub_id.revision}"
    return (
        f"{hub_id.repo} is no folder here; as a hub repository it is not complete on this machine "
        f"({wanted}), and Outsize is offline: {fault}. "
        f'Get it where there is a network: hf download {hub_id.repo}{revision} --include "{wanted}"'
    )
