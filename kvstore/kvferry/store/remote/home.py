"""A namespace as a remote tier knows it."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.core.keys import BlockKey
from kvferry.store.remote.manifest import Manifest, ManifestTemplate
from kvferry.store.remote.names import Names
from kvferry.store.tier import TierNamespace

__all__ = ["Home"]


class Home(NamedTuple):
    """Names and manifests of one namespace.

    Attributes:
        namespace: The namespace.
        names: Of the tier.
        root: What the names of its blocks begin with.
        template: Of its manifests.
    """

    namespace: TierNamespace
    names: Names
    root: str
    template: ManifestTemplate

    @classmethod
    def of(cls, namespace: TierNamespace, names: Names) -> Home:
        """The home of ``namespace``."""
        tenant = bytes.fromhex(names.tenant(namespace.tenant))
        return cls(namespace, names, names.home(namespace), ManifestTemplate(namespace, tenant))

    def name(self, key: BlockKey) -> str:
        """The name of a block."""
        return self.names.block(self.root, key)

    def part_names(self, key: BlockKey, manifest: Manifest) -> tuple[str, ...]:
        """The names of its parts."""
        base = self.name(key)
        return tuple(self.names.part(base, manifest.write_id, n) for n in range(len(manifest.parts)))
