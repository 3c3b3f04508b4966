"""The same bytes and the same values on a card as on the CPU."""

import pytest
import torch

from outsize.formats.nf4 import NF4
from outsize.formats.protocol import Format, make_format

pytestmark = pytest.mark.gpu

FORMATS = [
    *(
        make_format("nf4", {"group": g, "scales": s})
        for g in (64, 32)
        for s in ("fp32", "fp16", "double")
    ),
    *(make_format("int4", {"group": group}) for group in (32, 64, 128)),
    make_format("plain", {"dtype": "bf16"}),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (1537, 2048)


def encode(fmt: Format, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a matrix pushed in two slabs."""
    encoder = fmt.encoder(tuple(matrix.shape))
    encoder.push(matrix[:700])
    encoder.push(matrix[700:])
    return encoder.finish()


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Rows of sizes from 1e-3 to 1e2, with a zero row and weights on decision boundaries (bf16 has many)."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 2, SHAPE[0])[:, None]
    matrix = sizes * torch.randn(SHAPE, generator=generator)
    matrix[5] = 0
    return matrix.to(dtype)


@every_format
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_card_encodes_to_the_bytes_of_the_cpu(fmt: Format, dtype: torch.dtype) -> None:
    """A store may be prepared on one machine and checked on another."""
    matrix = weights(dtype)
    here, there = encode(fmt, matrix), encode(fmt, matrix.cuda())
    for name, part in here.items():
        assert there[name].is_cuda
        assert torch.equal(there[name].cpu(), part), f"part {name!r} differs"


@every_format
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_card_decodes_to_the_values_of_the_cpu(fmt: Format, dtype: torch.dtype) -> None:
    """By whichever kernel serves: it must give the reference's values."""
    parts = encode(fmt, weights(torch.float32))
    there = fmt.decode({name: part.cuda() for name, part in parts.items()}, SHAPE, dtype)
    assert torch.equal(there.cpu(), fmt.decode(parts, SHAPE, dtype))


@pytest.mark.filterwarnings(
    "ignore:TensorFloat32"
)  # inductor's advice on products, of which there is none
@every_format
def test_decoding_compiled_on_a_card_gives_the_same_values(fmt: Format) -> None:
    """Compiled by inductor in one graph; no multiply-add of it may round otherwise."""
    parts = {name: part.cuda() for name, part in encode(fmt, weights(torch.float32)).items()}
    NF4().kernel(torch.device("cuda", 0))
    torch.compiler.reset()  # each format's own graph, not a recompilation of the last one's
    eager = fmt.decode(parts, SHAPE, torch.bfloat16)
    compiled = torch.compile(fmt.decode, fullgraph=True)(parts, SHAPE, torch.bfloat16)
    assert torch.equal(compiled, eager)


def test_a_card_is_served_by_triton() -> None:
    """Where it does not work, the report says why, and this fails with it."""
    pytest.importorskip("triton")
    assert NF4().kernel(torch.device("cuda", 0)).startswith("triton ")


def test_parts_inside_one_packet_decode_alike() -> None:
    """Streaming hands out views into one buffer of bytes."""
    fmt = NF4(64, "double")
    parts = {name: part.cuda() for name, part in encode(fmt, weights(torch.float32)).items()}
    packet = torch.zeros(
        sum(part.nbytes + 256 for part in parts.values()), dtype=torch.uint8, device="cuda"
    )
    views, start = {}, 0
    for name, part in parts.items():
        packet[start : start + part.nbytes] = part.view(torch.uint8)
        views[name] = packet[start : start + part.nbytes].view(part.dtype)
        start += (part.nbytes + 255) // 256 * 256
    decoded = fmt.decode(views, SHAPE, torch.bfloat16)
    assert torch.equal(decoded, fmt.decode(parts, SHAPE, torch.bfloat16))
