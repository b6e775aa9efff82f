"""Attention's tables and biases: what they add, and what they cost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.models import attention
from trainer.models.attention import Alibi, AttentionCore, Rotary, slopes
from trainer.models.rope import Angles
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import ModelConfig
from trainer.tensor import block_attention
from trainer.tensor.block_attention import BlockAttention
from trainer.tensor.dropout import Noise, ShardedAttentionDropout

pytestmark = pytest.mark.slow


class Sizes(TorchDispatchMode):
    """Elements of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        output = function(*arguments, **(named or {}))
        self.made += [t.numel() for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
        return output


def core_of(heads: int, width: int, alibi: bool = False, fused: bool = True, dropout: float = 0.0) -> AttentionCore:
    """The core of a block with these heads."""
    positions, attention = "alibi" if alibi else "none", "fused" if fused else "unfused"
    model = ModelConfig(hidden=heads * width, heads=heads, positions=positions, attention=attention, dropout=dropout)
    return AttentionCore(resolve_model(model))


def biased(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """The textbook form: -slope (i - j) on every score. All [b, heads, s, d]."""
    s = query.shape[-2]
    distance = torch.arange(s, device=query.device)[:, None] - torch.arange(s)
    bias = -torch.tensor(slopes(heads), dtype=query.dtype)[:, None, None] * distance
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    return torch.softmax(scores.masked_fill(distance < 0, -math.inf), -1) @ value


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-10), (torch.float32, 2e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_by_further_columns_is_alibi(dtype: torch.dtype, off: float, heads: int) -> None:
    """For positions far beyond what bfloat16 can count, too."""
    torch.manual_seed(heads)
    query, key, value = (torch.randn(700, 2, heads, 24, dtype=dtype) for _ in range(3))
    got = core_of(heads, 24, alibi=True)(query, key, value).unflatten(2, (heads, -1))
    want = biased(*(t.double().permute(1, 2, 0, 3) for t in (query, key, value)), heads).permute(2, 0, 1, 3)
    assert (got.double() - want).abs().max() < off


def test_alibi_reaches_across_sixteen_bits_of_positions() -> None:
    """The further columns of a query and a key give slope times position to the last bit of fp32, in bfloat16."""
    query, key = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16), torch.zeros(1, 8, 40_000, 16, dtype=torch.bfloat16)
    wide_query, wide_key = Alibi(8, 1 / math.sqrt(16))(query, key, range(8))
    added = (wide_query.double() @ wide_key.double().transpose(-1, -2) / math.sqrt(16))[0, :, 0]
    want = torch.tensor(slopes(8), dtype=torch.float64)[:, None] * torch.arange(40_000)
    assert (added - want).abs().max() <= 2.0**-23 * want.max()


def test_fused_alibi_makes_nothing_of_sequence_by_sequence() -> None:
    """Before, a bias of heads x s x s per block."""
    s, heads = 128, 4
    core = core_of(heads, 8, alibi=True)
    with Sizes() as sizes:
        core(
            *(
                torch.randn(
                    s,
                    1,
                    heads,
                    8,
                )
                for _ in range(3)
            )
        )
    assert 0 < max(sizes.made) <= s * heads * (8 + 8) < s * s * heads


def dropping(heads: int, fused: bool, alibi: bool, visible: Tensor | None) -> AttentionCore:
    core = core_of(heads, 8, alibi=alibi, fused=fused, dropout=0.3)
    core.dropout = ShardedAttentionDropout(0.3, "core", Noise(3), core.heads, heads)
    core.in_blocks = BlockAttention(core.dropout)
    core.visible = None if visible is None else lambda: visible
    return core


def test_weights_are_dropped_by_the_places_of_query_and_key_however_many_there_are() -> None:
    """The last queries of a sequence are those of the whole; queries of another sequence are counted from its beginning."""
    own, crossing = (ShardedAttentionDropout(0.5, "core", Noise(3), range(2), 2, crosses) for crosses in (False, True))

    def mask(core: ShardedAttentionDropout, queries: int, keys: int) -> Tensor:
        return core._kept(torch.ones(1, 2, queries, keys), 16)

    assert torch.equal(mask(own, 3, 9), mask(own, 9, 9)[:, :, 6:])
    assert torch.equal(mask(crossing, 3, 9)[..., :5], mask(crossing, 3, 5))


@pytest.mark.parametrize(("groups", "alibi", "texts"), [(4, False, False), (2, False, True), (4, True, False)])
def test_dropout_in_blocks_of_queries_drops_the_same_weights(
    groups: int, alibi: bool, texts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients are those of scores that are spelled out: six blocks, the last of them shorter."""
    s, batch, heads = 40, 2, 4
    monkeypatch.setitem(block_attention.SCORES, "cpu", batch * heads * s * 7)
    torch.manual_seed(groups)
    place = torch.arange(s)
    visible = ((place <= place[:, None]) & (place // 13 == place[:, None] // 13)).expand(batch, 1, s, s) if texts else None
    inputs = [torch.randn(s, batch, n, 8, dtype=torch.float64) for n in (heads, groups, groups)]
    found = []
    for fused in (True, False):
        leaves = [each.clone().requires_grad_() for each in inputs]
        output = dropping(heads, fused, alibi, visible)(*leaves)
        output.backward(torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape))
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for blocked, plain in zip(*found):
        torch.testing.assert_close(blocked, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (3, 9), (8, 16), (5, 5)])
def test_the_last_query_sees_all_keys_and_each_before_it_one_less(queries: int, keys: int) -> None:
    seen = attention.lower_right(queries, keys, torch.device("cpu"))
    assert seen.sum(1).tolist() == list(range(keys - queries + 1, keys + 1)) and torch.equal(seen, seen.sort(1, descending=True).values)


def test_rotary_tables_are_made_once_for_all_layers() -> None:
    """Whatever number of heads queries and keys have."""
    attention._rotary_table.cache_clear()
    for _ in range(3):
        Rotary(Angles((1.0, 0.1, 0.01, 0.001)))(torch.randn(5, 1, 4, 8), torch.randn(5, 1, 2, 8))
    assert attention._rotary_table.cache_info().misses == 1


@pytest.mark.parametrize(("capability", "first"), [((9, 0), "CUDNN"), ((10, 0), "CUDNN"), ((8, 0), "FLASH"), ((12, 0), "FLASH")])
def test_the_fastest_attention_kernel_of_a_device_comes_first(capability: tuple[int, int], first: str) -> None:
    before = torch._C._get_sdp_priority_order()
    with attention.kernels_by_preference(capability):
        assert SDPBackend(torch._C._get_sdp_priority_order()[0]).name == f"{first}_ATTENTION"
    assert torch._C._get_sdp_priority_order() == before
