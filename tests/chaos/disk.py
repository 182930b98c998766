"""A small disk for the snapshots, which can be filled."""

from __future__ import annotations

import subprocess
from pathlib import Path

_BYTES = 16 << 20
_BALLAST = "ballast"


class Disk:
    """A tmpfs of a few megabytes or, if this user may not mount one, a folder that can be made read-only.

    Args:
        folder: its mount point, which is created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "tmpfs", str(folder)]
        try:
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:  # The program does not exist.
            self.mounted = False
        self.how = f"a tmpfs of {_BYTES >> 20} MiB" if self.mounted else "a folder closed to writing (no mount here)"
        self.full = False

    def fill(self) -> None:
        """Fill the disk; this is repeated at intervals, because deletions in the meantime free space."""
        self.full = True
        if not self.mounted:
            self._set_modes(0o555)
            return
        try:
            with (self.folder / _BALLAST).open("ab", buffering=0) as file:
                for size in (1 << 16, 1 << 12):
                    piece = bytes(size)
                    while file.write(piece) == size:
                        pass
        except OSError:  # The disk is full.
            return

    def free(self) -> None:
        """Free the filled space."""
        self.full = False
        if self.mounted:
            (self.folder / _BALLAST).unlink(missing_ok=True)
        else:
            self._set_modes(0o755)

    def _set_modes(self, mode: int) -> None:
        for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            folder.chmod(mode)

    def close(self) -> None:
        """Unmount the disk."""
        self.free()
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True, capture_output=True)
            self.mounted = False
