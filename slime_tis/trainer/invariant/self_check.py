"""Chooses the tiles of matrix products, and tests all operations on this machine.

Libraries do not guarantee the rules of `operations`. They depend on the processor, the build, the
number of threads and the sizes of the matrices. Therefore a run first tests every operation on
random inputs in the shapes of its model, and is refused if rows depend on other rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.trainer.invariant.operations import (
    KEYS,
    Tiles,
    attention,
    has_whole_vectors,
    product,
    rms_norm,
    rotate,
    silu,
    token_log_probs,
)

QKV = "query, key and value"
ATTENTION_OUTPUT = "attention output"
GATE_UP = "gate and up"
DOWN = "down"
HEAD = "output layer"

CANDIDATES = {
    torch.float32: (Tiles(16, 2048), Tiles(64, 2048), Tiles(64, 512), Tiles(64, 128)),
    torch.bfloat16: (Tiles(16, 2048), Tiles(64, 2048), Tiles(64, 512), Tiles(64, 256)),
}
"""Tiles by type of the weights, the fastest first (docs/true_on_policy.md has times)."""
LAST_CANDIDATES = (Tiles(64, 128), Tiles(64, 64), Tiles(128, 128))
"""Tiles that were slower on all tested machines, but keep the rules on more machines."""
MAX_MULTIPLICATIONS = 10**9
"""Most multiplications of one product. Larger tiles save no time and make the test slow."""
DRAWS = 3
"""Random inputs of an operation."""


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """Sizes of a dense decoder, and the number of tensor-parallel ranks that divide it."""

    hidden: int
    heads: int
    groups: int
    head_features: int
    inner: int
    vocabulary: int
    ranks: int = 1

    @property
    def vocabulary_part(self) -> int:
        """Tokens of a rank; the last rank may have fewer."""
        return -(-self.vocabulary // self.ranks)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The choices that both engines share."""

    tiles: Mapping[str, Tiles]
    """By linear layer: `QKV`, `ATTENTION_OUTPUT`, `GATE_UP`, `DOWN`, `HEAD`."""
    vectorized_silu: bool
    ranks: int
    """Tensor-parallel size: in how many parts row-parallel layers and the vocabulary are summed."""
    vocabulary_part: int
    """Tokens of a rank."""

    def __str__(self) -> str:
        """The rows of matrix products, for the log of a run."""
        rows = []
        for name, tiles in self.tiles.items():
            rows.append(f"{name} {tiles.base} to {tiles.most}")
        return f"rows of a product: {', '.join(rows)}"


@dataclass(frozen=True)
class _Layer:
    """The matrices that both engines multiply for one linear layer.

    The rollout engine has separate matrices of all rows, and training has one matrix per rank.
    """

    separate: Sequence[Tensor]
    fused: Sequence[Tensor]
    """Matrices of the ranks, whose rows together are those of `order`."""
    order: Tensor
    """Row of the concatenated separate matrices for each row of the fused ones."""


def choose_kernels(shapes: ModelShapes, dtype: torch.dtype, seed: int = 0) -> Kernels:
    """Returns the fastest tiles that keep the promise on this machine.

    Raises:
        ValueError: A row of an operation depends on other rows. The message names the operation.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tiles = {}
        for name, outputs in _output_sizes(shapes).items():
            inputs = _input_size(name, shapes)
            layer = _layer(name, shapes, inputs, outputs, dtype, generator)
            tiles[name] = _choose_tiles(name, layer, dtype, generator)
        vectorized = has_whole_vectors(shapes.inner // shapes.ranks)
        operations = _Operations(shapes, dtype, generator, vectorized)
        for name, holds in operations.tests().items():
            for _ in range(DRAWS):
                if not holds():
                    raise _refusal(name, dtype)
    return Kernels(
        tiles=tiles,
        vectorized_silu=vectorized,
        ranks=shapes.ranks,
        vocabulary_part=shapes.vocabulary_part,
    )


def _refusal(name: str, dtype: torch.dtype) -> ValueError:
    threads = torch.get_num_threads()
    remedy = "try another precision, or remove the flag"
    if threads > 1:
        remedy = "try --num-threads 1 or another precision, or remove the flag"
    return ValueError(
        f"--true-on-policy: on this machine the operation {name!r} in {str(dtype)[6:]} gives other"
        f" bits for another batch (--num-threads {threads}); {remedy}."
    )


# Linear layers


def _output_sizes(shapes: ModelShapes) -> dict[str, list[int]]:
    """Returns the output features of the rollout engine's matrices, by layer."""
    keys = shapes.groups * shapes.head_features
    return {
        QKV: [shapes.heads * shapes.head_features, keys, keys],
        ATTENTION_OUTPUT: [shapes.hidden],
        GATE_UP: [shapes.inner, shapes.inner],
        DOWN: [shapes.hidden],
        HEAD: [shapes.vocabulary],
    }


def _input_size(name: str, shapes: ModelShapes) -> int:
    """Returns the input features of one sum: row-parallel ranks divide them."""
    if name == ATTENTION_OUTPUT:
        return shapes.heads * shapes.head_features // shapes.ranks
    if name == DOWN:
        return shapes.inner // shapes.ranks
    return shapes.hidden


def _layer(
    name: str,
    shapes: ModelShapes,
    inputs: int,
    outputs: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> _Layer:
    """Makes random matrices of both engines for a linear layer."""
    ranks = shapes.ranks
    separate = []
    for size in outputs:
        # The rollout engine has all input features of a row-parallel layer: a view of a part.
        separate.append(_random(generator, (size, inputs * ranks), dtype)[:, :inputs])
    rows = torch.arange(sum(outputs))
    if name == QKV:
        # megatron-core's order: per group its queries, its keys and its values
        per_group = []
        for matrix in rows.split(list(outputs)):
            per_group.append(matrix.view(shapes.groups, -1))
        rows = torch.cat(per_group, 1).flatten()
    elif name == GATE_UP:
        # per rank its rows of gate and its rows of up
        rows = rows.view(2, ranks, -1).transpose(0, 1).flatten()
    if name in (ATTENTION_OUTPUT, DOWN):
        ranks = 1  # every rank has all output features
    joined = torch.cat(separate)[rows]
    fused = list(joined.split(-(-len(rows) // ranks)))
    return _Layer(separate=separate, fused=[part.clone() for part in fused], order=rows)


def _choose_tiles(
    name: str, layer: _Layer, dtype: torch.dtype, generator: torch.Generator
) -> Tiles:
    """Returns the first candidate with which both engines get equal rows."""
    features = sum(map(len, layer.fused))
    inputs = layer.fused[0].shape[1]
    for candidate in (*CANDIDATES[dtype], *LAST_CANDIDATES):
        rows = MAX_MULTIPLICATIONS // (features * inputs)
        affordable = rows // candidate.base * candidate.base
        most = max(candidate.base, min(candidate.most, affordable))
        tiles = Tiles(candidate.base, most)
        if all(_rows_are_equal(layer, tiles, dtype, generator) for _ in range(DRAWS)):
            return tiles
    raise _refusal(f"linear layer: {name}", dtype)


def _rows_are_equal(
    layer: _Layer, tiles: Tiles, dtype: torch.dtype, generator: torch.Generator
) -> bool:
    """Whether random rows are equal for every size of a tile and in both engines' matrices."""
    x = _random(generator, (tiles.most, layer.fused[0].shape[1]), dtype)
    smallest = Tiles(tiles.base, tiles.base)
    expected = _products(x, layer.fused, smallest)
    expected_separate = expected[:, layer.order.argsort()]
    for rows in _sizes(tiles, generator):
        fused = _products(x[:rows], layer.fused, tiles)
        separate = _products(x[:rows], layer.separate, tiles)
        if not torch.equal(fused, expected[:rows]):
            return False
        if not torch.equal(separate, expected_separate[:rows]):
            return False
    return True


def _products(x: Tensor, matrices: Sequence[Tensor], tiles: Tiles) -> Tensor:
    """Returns the products with all matrices, side by side."""
    return torch.cat([product(x, matrix, tiles) for matrix in matrices], 1)


def _sizes(tiles: Tiles, generator: torch.Generator) -> Iterator[int]:
    """Yields numbers of rows: small tiles, the largest one, and a few that need padding."""
    for count in (1, 2, 3, 5):
        yield min(count * tiles.base, tiles.most)
    yield tiles.most
    for _ in range(4):
        yield int(torch.randint(1, tiles.most + 1, (), generator=generator))


# Other operations


@dataclass(frozen=True)
class _Operations:
    """Tests of the other operations. Every call draws new inputs."""

    shapes: ModelShapes
    dtype: torch.dtype
    generator: torch.Generator
    vectorized_silu: bool

    def tests(self) -> dict[str, Callable[[], bool]]:
        """Returns the tests by the name of the operation."""
        return {
            "norm": self.norm,
            "norm of heads": self.head_norm,
            "rotary embedding": self.rotary_embedding,
            "attention": self.attention,
            "silu": self.silu,
            "log-softmax": self.log_probs,
        }

    def norm(self) -> bool:
        """Norms of the hidden states."""
        weight = self._random(self.shapes.hidden)
        x = self._random(64, self.shapes.hidden)
        return _is_row_by_row(lambda rows: rms_norm(rows, weight, 1e-6), x)

    def head_norm(self) -> bool:
        """Norms of queries: a view of the fused matrix in training, a tensor in the engine."""
        features = self.shapes.head_features
        weight = self._random(features)
        view = self._random(64, self.shapes.heads, 3 * features)[..., :features]
        is_equal = torch.equal(rms_norm(view, weight, 1e-6), rms_norm(view.clone(), weight, 1e-6))
        return is_equal and _is_row_by_row(lambda rows: rms_norm(rows, weight, 1e-6), view)

    def silu(self) -> bool:
        """silu of a rank's gate, a view of gate and up in training, and of all of gate."""
        ranks = self.shapes.ranks
        part = self.shapes.inner // ranks
        gate = self._random(64, 2 * part)[:, :part]

        def function(x: Tensor) -> Tensor:
            return silu(x, vectorized=self.vectorized_silu)

        all_ranks = torch.cat([gate] * ranks, 1)
        expected = torch.cat([function(gate)] * ranks, 1)
        return torch.equal(function(all_ranks), expected) and _is_row_by_row(function, gate)

    def rotary_embedding(self) -> bool:
        """The rotary embedding of one token and of all."""
        frequencies = torch.rand(self.shapes.head_features // 2, generator=self.generator)
        positions = torch.arange(64.0)[:, None, None]
        x = self._random(64, self.shapes.heads, self.shapes.head_features)

        def function(rows: Tensor, position: Tensor) -> Tensor:
            angle = position * frequencies
            return rotate(rows, angle.cos(), angle.sin())

        row = slice(40, 41)
        return torch.equal(function(x[row].clone(), positions[row]), function(x, positions)[row])

    def log_probs(self) -> bool:
        """Log-probs of some rows and of all."""
        logits = self._random(64, self.shapes.vocabulary).float() * 3.0
        part_size = self.shapes.vocabulary_part

        def function(rows: Tensor) -> Tensor:
            return token_log_probs(rows, torch.zeros(len(rows), dtype=torch.int64), part_size)

        return _is_row_by_row(function, logits)

    def attention(self) -> bool:
        """Decoding and prefill in chunks against a complete pass, at random lengths."""
        shapes = self.shapes
        heads = shapes.heads // shapes.ranks
        groups = max(shapes.groups // shapes.ranks, 1)
        batch = self._integer(1, 4)
        length = self._integer(2, 4 * KEYS)
        # A cache has other tokens after the sequence.
        slots = length + self._integer(0, 2 * KEYS)
        query = self._random(batch, heads, length, shapes.head_features)
        keys = self._random(batch, groups, slots, shapes.head_features)
        values = self._random(batch, groups, slots, shapes.head_features)
        scale = shapes.head_features**-0.5
        expected = attention(query, keys[:, :, :length], values[:, :, :length], None, scale)
        end = self._integer(1, length)
        for start in (end - 1, end // 2):
            rows = slice(start, end)
            seen = torch.arange(slots) <= torch.arange(start, end)[:, None]
            for sequences in (slice(0, 1), slice(0, batch)):
                part = attention(
                    query[sequences, :, rows], keys[sequences], values[sequences], seen[None], scale
                )
                if not torch.equal(part, expected[sequences, :, rows]):
                    return False
        return True

    def _integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def _random(self, *size: int) -> Tensor:
        return _random(self.generator, size, self.dtype)


def _is_row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether a function of 64 rows gives the same bits for some of the rows."""
    expected = function(x)
    for start, count in ((0, 1), (1, 2), (5, 3), (7, 16), (30, 33)):
        rows = slice(start, start + count)
        # A copy has another address and alignment, as in another batch.
        if not torch.equal(function(x[rows].clone()), expected[rows]):
            return False
    return True


def _random(generator: torch.Generator, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*size, generator=generator).to(dtype)
