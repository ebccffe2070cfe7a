"""Where emergency copies are: folders, neighbours, and which copies are complete."""

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxcomp.launch import parts
from jaxcomp.launch.parts import ALL


class Found(NamedTuple):
    """A step with copies of all parts."""

    step: int
    holders: dict[str, list[int]]  # part's file name -> the processes that have it


def chosen(held: Sequence[dict[str, Any]], at_least: int) -> Found | str:
    """The newest step with all parts, among those that the processes report."""
    holders: dict[str, list[int]] = {}
    steps: dict[tuple[int, int], dict[str, str]] = {}  # step, count -> names by part
    for process, report in enumerate(held):
        texts = report.get("names")
        for text in texts if isinstance(texts, list) else []:
            name = parts.read_name(text) if isinstance(text, str) else None
            if name is not None and name.step >= at_least:
                holders.setdefault(text, []).append(process)
                names = steps.setdefault((name.step, name.count), {})
                names[name.part] = max(text, names.get(name.part, ""))
    missing = ""
    for (step, count), names in sorted(steps.items(), reverse=True):
        needed = itertools.chain(map(str, range(count)), [ALL])
        # The first few: a name may speak of any number of processes.
        lacking = list(itertools.islice((part for part in needed if part not in names), 9))
        if not lacking:
            return Found(step, {text: holders[text] for text in names.values()})
        lost = ", ".join(lacking[:8]) + (", ..." if len(lacking) > 8 else "")
        missing = missing or f"nobody has these parts of step {step}: {lost}"
    return missing


def neighbours(hosts: Sequence[str]) -> list[int]:
    """For each process, the process that keeps its copy: on the next host, if there are several."""
    on_host: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        on_host.setdefault(host, []).append(process)
    if len(on_host) == 1:
        return [(process + 1) % len(hosts) for process in range(len(hosts))]
    names = list(on_host)
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    found = []
    for process, host in enumerate(hosts):
        there = on_host[following[host]]
        found.append(there[on_host[host].index(process) % len(there)])
    return found


def folders_for(
    base: Path, run: Path, hosts: Sequence[str], me: int, instead: str = ""
) -> list[Path]:
    """Folders on this host for a run's copies, this process's own first.

    Folders of processes that are no longer on this host are distributed among those that are.
    """
    here = [process for process, host in enumerate(hosts) if host == hosts[me]]
    rank = here.index(me)
    top = _private(base / f"jaxcomp-{os.getuid()}", instead)
    run_folder = top / hashlib.sha256(str(run).encode()).hexdigest()[:16]
    own = run_folder / str(rank)
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    there = [path for path in run_folder.iterdir() if path.name.isdecimal()]
    left = [path for path in there if path != own and int(path.name) % len(here) == rank]
    return [own, *sorted(left)]


def _private(folder: Path, instead: str) -> Path:
    """Makes a folder that only this user can enter; its parent may be shared, such as /tmp."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not os.path.isdir(folder) or folder.is_symlink() or found.st_uid != os.getuid():
        raise OSError(errno.EPERM, f"{folder} is not a folder of this user. {instead}".rstrip())
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder
