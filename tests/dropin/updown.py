"""updown: keys `<module>.down` and `<module>.up`, rank and alpha in the header; a dialect dropped in by test_dropin.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outsize.base.errors import AdapterError
from outsize.base.layout import Layout
from outsize.dialects.protocol import AdapterFile, AdapterWeights, LoraPair, TensorFile


class UpDown:
    """One file."""

    is_folder = False

    def write(
        self,
        adapter: AdapterWeights,
        layouts: Sequence[Layout],  # noqa: ARG002 - our names
        metadata: Mapping[str, str],
    ) -> dict[str, AdapterFile]:
        downs = {f"{name}.down": pair.A for name, pair in adapter.pairs.items()}
        ups = {f"{name}.up": pair.B for name, pair in adapter.pairs.items()}
        return {"adapter.safetensors": TensorFile(downs | ups, metadata)}

    def read(
        self,
        files: Mapping[str, AdapterFile],
        layouts: Sequence[Layout],  # noqa: ARG002
    ) -> AdapterWeights:
        (file,) = files.values()
        if not isinstance(file, TensorFile):
            raise AdapterError("an updown adapter is one safetensors file")
        names = [key.removesuffix(".down") for key in file.tensors if key.endswith(".down")]
        pairs = {
            name: LoraPair(file.tensors[f"{name}.down"], file.tensors[f"{name}.up"])
            for name in names
        }
        facts = file.metadata
        return AdapterWeights(pairs, int(facts["outsize.rank"]), float(facts["outsize.alpha"]))


plugin = UpDown()
