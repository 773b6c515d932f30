"""On what sort of storage caches and models lie: the mounted file systems, and the one that a path is on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from ...devices.machine import import_psutil, run_command
from .surroundings import Place
from .variables import short_path

MOUNT = ["/sbin/mount"]

NETWORK = re.compile(
    r"nfs\d?|smbfs|smb3|cifs|afpfs|webdav|ncpfs|9p|virtiofs|ceph|glusterfs|lustre|gpfs|beegfs|afs|davfs|ftp"
    r"|fuse\.(sshfs|rclone|s3fs|gcsfuse|goofys|glusterfs|ceph\S*)|macfuse|osxfuse|fuse"
)
MEMORY = re.compile(r"tmpfs|ramfs|devtmpfs")
EXTERNAL = ("/Volumes/", "/media/", "/run/media/")
"""Where systems mount what was plugged in."""

Kind = Literal["local", "network", "external", "memory", "not known"]


@dataclass(frozen=True)
class Mounted:
    """A mounted file system.

    Attributes:
        point: Where it is mounted.
        filesystem: Its type.
        options: What it is mounted with.
    """

    point: str
    filesystem: str
    options: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """What sort of storage it is.

        Example:
            >>> Mounted("/Volumes/Notes", "smbfs").kind, Mounted("/Volumes/Stick", "exfat").kind, Mounted("/", "apfs").kind
            ('network', 'external', 'local')
        """
        if NETWORK.fullmatch(self.filesystem.lower()) or "remote" in self.options:
            return "network"
        if MEMORY.fullmatch(self.filesystem.lower()):
            return "memory"
        return "external" if self.point.startswith(EXTERNAL) or "removable" in self.options else "local"


def parse_mount(output: str | None) -> tuple[Mounted, ...]:
    """Return the file systems that macOS' ``mount`` lists; users and servers are not read.

    Example:
        >>> parse_mount("//me@nas/share on /Volumes/My share (smbfs, nodev, nosuid, mounted by me)")[0].point
        '/Volumes/My share'
    """
    found = re.findall(r"^.+? on (/.*) \(([^()]+)\)$", output or "", re.MULTILINE)
    return tuple(Mounted(point, *_told(told)) for point, told in found)


def read_mounts(system: str, run: Callable[[list[str]], str | None] = run_command) -> tuple[Mounted, ...]:
    """Return the mounted file systems of this computer.

    Args:
        system: What ``platform.system()`` says.
        run: Runs a command.

    Example:
        >>> import platform
        >>> len(read_mounts(platform.system())) > 0
        True
    """
    if system == "Darwin":
        return parse_mount(run(MOUNT))
    psutil = import_psutil()
    try:
        partitions = psutil.disk_partitions(all=True)
    except OSError:  # Some containers hide the list.
        return ()
    return tuple(Mounted(one.mountpoint, one.fstype, tuple(one.opts.split(","))) for one in partitions)


def mounted_at(path: Path, mounts: Sequence[Mounted]) -> Mounted | None:
    """Return the file system that a path is on: the deepest, and of several at one place the last, which hides the others.

    Example:
        >>> mounts = (Mounted("/", "ext4"), Mounted("/data", "nfs"), Mounted("/data", "nfs4"))
        >>> mounted_at(Path("/data/models"), mounts).filesystem, mounted_at(Path("/database"), mounts).filesystem
        ('nfs4', 'ext4')
    """
    above = {str(one) for one in (path, *path.parents)}
    found = [one for one in mounts if one.point in above]
    return max(found, key=lambda one: (_depth(one.point), mounts.index(one)), default=None)


def places(wanted: Mapping[str, Path], mounts: Sequence[Mounted]) -> tuple[Place, ...]:
    """Return where each of some paths lies; links are followed, and a path that is not there yet counts as if it were."""
    return tuple(_place(what, path, mounted_at(_real(path), mounts)) for what, path in wanted.items())


def _real(path: Path) -> Path:
    """Return where a path leads; os.path answers for any, Path raises for a circle of links and an unknown person."""
    return Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111


def _place(what: str, path: Path, mounted: Mounted | None) -> Place:
    if mounted is None:
        return Place(what, short_path(path), None, "not known")
    return Place(what, short_path(path), mounted.filesystem, mounted.kind)


def cache_folders(environ: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Return where models are cached, by the variables that huggingface_hub and torch.hub read.

    Example:
        >>> cache_folders({"TORCH_HOME": "/data/torch"}, Path("/home/me"))["torch cache"].as_posix()
        '/data/torch'
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environ.get("HF_HOME") or cache / "huggingface")
    return {
        "Hugging Face cache": Path(environ.get("HF_HUB_CACHE") or hub / "hub"),
        "torch cache": Path(environ.get("TORCH_HOME") or cache / "torch"),
    }


def _told(told: str) -> tuple[str, tuple[str, ...]]:
    filesystem, *options = told.split(", ")
    return filesystem, tuple(options)


def _depth(point: str) -> int:
    return len((PureWindowsPath(point) if "\\" in point else PurePosixPath(point)).parts)
