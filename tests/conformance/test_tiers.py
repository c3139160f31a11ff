from __future__ import annotations

import errno
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import Tier, TierNamespace
from kvferry.testing.faulty_files import FaultyFiles
from kvferry.testing.tiers import TierSuite
from kvferry.testing.tiers_common import SPEC, Damage, Fault, write

# a block of the suite with its header, and a folder for each: its keys fall into folders of their own
FILE_NBYTES = 12 << 10
FOLDER_NBYTES = 8 << 10
OVERHEAD_NBYTES = 160 << 10


class DiskSuite(TierSuite):
    """The disk tier; what is below is the same for any number of directories."""

    directories = 1
    direct = "off"
    sync = "none"
    codec = "off"
    flipped = 777

    def paths(self, medium: Path) -> list[Path]:
        return [medium / f"disk{number}" for number in range(self.directories)]

    def make_tier(self, medium: Path, blocks: int) -> Tier:
        capacity = blocks * (FILE_NBYTES + FOLDER_NBYTES) + OVERHEAD_NBYTES * self.directories
        options = DiskOptions(
            directories=tuple(str(p) for p in self.paths(medium)),
            capacity_nbytes=capacity,
            direct=self.direct,  # type: ignore[arg-type]
            sync=self.sync,  # type: ignore[arg-type]
            retry_s=0.05,
        )
        return DiskTier("disk", options, files=FaultyFiles(), codec=TierCodec(self.codec))

    def file(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> Path:
        assert isinstance(tier, DiskTier)
        folder = Path(namespace.tenant, namespace.namespace_id.hex(), key.hex()[:2])
        found = [Path(d) / folder / f"{key.hex()}.safetensors" for d in tier.options.directories]
        (path,) = [p for p in found if p.exists()]
        return path

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        path = self.file(tier, namespace, key)
        if how == "swap":
            shutil.copyfile(self.file(tier, namespace, other), path)
        elif how == "flip":
            data = bytearray(path.read_bytes())
            data[HeaderTemplate(TierNamespace.of("default", SPEC)).header_nbytes + self.flipped] ^= 4
            path.write_bytes(data)
        else:
            with path.open("r+b") as file:
                file.truncate(0 if how == "empty" else path.stat().st_size // 2)

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        self.file(tier, namespace, key).unlink()

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        assert isinstance(tier, DiskTier)
        files = tier.files
        assert isinstance(files, FaultyFiles)
        if kind == "stall":
            return files.stalling("preadv")
        if kind == "full":
            return files.failing("pwritev", error=errno.ENOSPC)
        return files.failing("preadv" if kind == "read" else "pwritev")


class TestOneDirectory(DiskSuite):
    pass


class TestTwoDirectories(DiskSuite):
    directories = 2
    sync = "data"


class TestDirect(DiskSuite):
    """O_DIRECT and full syncs where the file system can, else as without."""

    direct = "on"
    sync = "full"


class TestEncoded(DiskSuite):
    """Blocks become a sixth: the suite's bytes repeat themselves."""

    codec = "zstd"
    flipped = 177

    def test_blocks_are_encoded_here(
        self, tier: Tier, namespace: TierNamespace, keys: list[BlockKey]
    ) -> None:
        write(tier, namespace, keys)
        assert {entry.codec for entry in tier.scan()} == {"zstd"}
        assert self.file(tier, namespace, keys[0]).stat().st_size < FILE_NBYTES
