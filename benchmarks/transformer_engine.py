"""Transformer Engine without a GPU, to see what its modules take the host: its Python as it is, its compiled functions stood in for.

A wheel of ``transformer_engine`` has all of its Python; what is compiled is in packages of its own. Each compiled function that a block
calls is one operation of PyTorch here, on a few numbers, and makes the tensors that it would: what a launch takes the host, more or less.
Results are not right, shapes are. Checks for a GPU are taken out of a copy. It needs einops.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import importlib
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHECKS = {
    "torch.cuda.is_available()": "True",
    "inp.is_cuda": "True",
    "query_layer.is_cuda": "True",
    "key_layer.is_cuda": "True",
    "value_layer.is_cuda": "True",
    "[torch.float16, torch.bfloat16]": "[torch.float16, torch.bfloat16, torch.float32]",
    "[torch.bfloat16, torch.float16, torch.float8_e4m3fn]": "[torch.bfloat16, torch.float16, torch.float32]",
}
"""What asks for a GPU, and for 16 bits, in which a host's products are slower."""
TOKENS = 16
"""That products in 8 bits ask for at least."""
_device = torch.device("cpu")
"""Of what compiled functions make."""


def install(folder: Path, device: torch.device) -> None:
    """Make ``transformer_engine.pytorch`` of an unpacked wheel importable, for tensors of ``device``."""
    global _device
    _device = device
    copy = Path(tempfile.mkdtemp(prefix="transformer-engine-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(folder / "transformer_engine", copy / "transformer_engine")
    for path in (copy / "transformer_engine" / "pytorch").rglob("*.py"):
        text = path.read_text()
        for check, passed in CHECKS.items():
            text = text.replace(check, passed)
        path.write_text(text)
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    if device.type != "cuda":
        _without_device()
    sys.modules["transformer_engine_torch"] = _compiled()
    _without_kernels_of_triton(copy / "transformer_engine")
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(copy / "transformer_engine")]
    package.__version__ = next(folder.glob("transformer_engine-*.dist-info")).name.split("-")[1].removesuffix(".dist")  # type: ignore[attr-defined]
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None  # type: ignore[attr-defined]
    package.common = common  # type: ignore[attr-defined]
    package.pytorch = importlib.import_module("transformer_engine.pytorch")  # type: ignore[attr-defined]


def _without_kernels_of_triton(root: Path) -> None:
    """Modules with kernels in Triton, and that for export, are stood in for: a block does without them."""
    kernels = root / "pytorch" / "triton"
    for path in (kernels, *kernels.glob("[!_]*.py"), root / "pytorch" / "onnx_extensions.py"):
        name = ".".join(("transformer_engine", *path.relative_to(root).with_suffix("").parts))
        sys.modules[name] = _Anything(name)


class _Anything(types.ModuleType):
    """A module in which every name is known, and nothing can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} needs a GPU")

        return refuse


class _Names:
    """An enumeration, of which only the names count."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Name(f"{self._kind}.{name}")
        setattr(self, name, found)
        return found


class _Name(str):
    def __int__(self) -> int:
        return 1


class _Compiled(types.ModuleType):
    """``transformer_engine_torch``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Names(name) if name[0].isupper() else getattr(_Anything("transformer_engine_torch"), name)
        setattr(self, name, found)
        return found


def _compiled() -> types.ModuleType:
    found = _Compiled("transformer_engine_torch")
    known: dict[str, Any] = {
        one.__name__: one
        for one in (
            generic_gemm,
            te_general_grouped_gemm,
            quantize,
            split_quantize,
            bgrad_quantize,
            layernorm_fwd,
            layernorm_bwd,
            rmsnorm_fwd,
            rmsnorm_bwd,
            fused_attn_fwd,
            fused_attn_bwd,
            fused_multi_row_padding,
        )
    }
    known |= {name: type(name, (), {}) for name in ("CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "FP8TensorMeta")}
    kinds = [(f"GEMM{1 + i // 3}_{('INPUT', 'WEIGHT', 'OUTPUT')[i % 3]}", i) for i in range(9)]
    ways = [(f"{('GRAD_OUTPUT', 'GRAD_INPUT')[i % 2]}{1 + i // 2}", i) for i in range(6)]
    known |= {
        "FP8FwdTensors": enum.IntEnum("FP8FwdTensors", kinds),
        "FP8BwdTensors": enum.IntEnum("FP8BwdTensors", ways),
        "fused_multi_row_unpadding": fused_multi_row_padding,
        "fused_amax_and_scale_update_after_reduction": lambda *_: None,
        "get_fused_attn_backend": lambda *_: found.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
        "get_cublasLt_version": lambda: 120900,
        "get_cudnn_version": lambda: 91300,
        "get_num_cublas_streams": lambda: 4,
        "get_stream_priority_range": lambda: (0, -5),
        "ubuf_built_with_mpi": lambda: False,
        "device_supports_multicast": lambda *_: True,
    }
    vars(found).update(known)
    return found


def generic_gemm(a: Any, turned: bool, b: Any, b_turned: bool, out: Tensor | None, *more: Any, **_: Any) -> tuple[Any, ...]:
    """A product; ``more`` begins with quantizer, type, bias, its type, two of an activation, and whether it is of backward."""
    bias, backward = more[2], more[6]
    bias_gradient = torch.empty(bias.shape, device=_device) if backward and bias is not None else None
    if out is None:
        (rows, columns), others = _two(a), _shape(b)
        shape = (others[-1], columns) if b_turned else (*others[:-1], rows if turned else columns)
        out = torch.empty(shape, device=_device)
    return out.mul_(1.0), bias_gradient, None, None


def te_general_grouped_gemm(*given: Any) -> Any:
    """One product for each expert that has tokens."""
    out, splits, bias, single = given[4], given[6], given[7], given[9]
    for i, tokens in enumerate(splits):
        if tokens:
            (out[0] if single else out[i]).mul_(1.0)
    return bias


def quantize(source: Tensor, quantizer: Any, out: Any = None, _: Any = None) -> Any:
    torch.mul(source, 1.0)
    return _cast(source.shape, quantizer, source.dtype) if out is None else out


def split_quantize(source: Tensor, splits: Sequence[int], quantizers: Sequence[Any]) -> list[Any]:
    return [quantize(part, one) for part, one in zip(torch.split(source, list(splits)), quantizers)]


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return torch.sum(gradient.reshape(-1, gradient.shape[-1]), 0), quantize(gradient, quantizer)


def _cast(shape: Sequence[int], quantizer: Any, dtype: torch.dtype) -> Any:
    """An operand in 8 bits, as the compiled function makes it: bytes, their transpose, a scale, and one call of the class."""
    if not quantizer.internal:
        return quantizer.make_empty(shape, dtype=dtype, device=_device)
    kind = importlib.import_module("transformer_engine.pytorch.tensor._internal.float8_tensor_base").Float8TensorBase
    data = torch.empty(tuple(shape), dtype=torch.uint8, device=_device) if quantizer.rowwise_usage else None
    turned = torch.empty((shape[-1], *shape[:-1]), dtype=torch.uint8, device=_device) if quantizer.columnwise_usage else None
    scale = torch.empty(1, device=_device)
    return kind(data=data, fp8_scale_inv=scale, fp8_dtype=quantizer.dtype, data_transpose=turned, quantizer=quantizer)


def _shape(one: Any) -> tuple[int, ...]:
    if isinstance(one, Tensor) or getattr(one, "_data", None) is not None:
        return tuple((one if type(one) in (Tensor, torch.nn.Parameter) else one._data).shape)
    turned = tuple(one._transpose.shape)
    return (*turned[1:], turned[0])


def _two(one: Any) -> tuple[int, int]:
    shape = _shape(one)
    return shape[0], shape[-1]


def _normed(found: tuple[Tensor, Tensor, Tensor], quantizer: Any) -> tuple[Any, Tensor, Tensor]:
    return found if quantizer is None else (_cast(found[0].shape, quantizer, found[0].dtype), found[1], found[2])


def layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float, _: Any, quantizer: Any, *__: Any) -> tuple[Any, Tensor, Tensor]:
    return _normed(torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps), quantizer)


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, _: Any, quantizer: Any, *__: Any) -> tuple[Any, Tensor, Tensor]:
    return _normed(torch.native_layer_norm(x, (x.shape[-1],), weight, None, eps), quantizer)


def layernorm_bwd(gradient: Tensor, x: Tensor, mean: Tensor, spread: Tensor, weight: Tensor, *_: Any) -> Any:
    return torch.ops.aten.native_layer_norm_backward(gradient, x, (x.shape[-1],), mean, spread, weight, weight, [True] * 3)


def rmsnorm_bwd(gradient: Tensor, x: Tensor, spread: Tensor, weight: Tensor, *_: Any) -> Any:
    wanted = [True, True, False]
    return torch.ops.aten.native_layer_norm_backward(gradient, x, (x.shape[-1],), spread, spread, weight, None, wanted)[:2]


def fused_attn_fwd(*given: Any) -> list[Tensor]:
    """Output, statistics and the random state; the queries are the fourteenth argument."""
    return [torch.add(given[13], 0.0), torch.empty(1, device=_device), torch.empty(2, device=_device)]


def fused_attn_bwd(*given: Any) -> list[Tensor]:
    return [torch.mul(one, 1.0) if i == 0 else torch.empty_like(one) for i, one in enumerate(given[13:16])]


def fused_multi_row_padding(_: Tensor, out: Tensor, *__: Any) -> None:
    out.mul_(1.0)


class _Idle:
    """A stream or an event of a device that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return _Idle

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


class _Properties:
    major, minor, multi_processor_count, name, gcnArchName = 9, 0, 132, "", ""


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _without_device() -> None:
    """``torch.cuda`` answers like that of a Hopper device whose memory is the host's."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.device = _Idle
    cuda.current_stream = _Idle
    cuda.stream = _nothing
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: _Properties()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda *_: torch.zeros(1)
    cuda.set_rng_state = lambda *_: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda *_: None
    there: Any = torch
    for name in ("empty", "zeros", "ones", "tensor", "full", "rand", "randn"):
        setattr(there, name, _on_host(getattr(torch, name)))


def _on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*given: Any, **how: Any) -> Tensor:
        if str(how.get("device", "")).startswith("cuda"):
            how["device"] = "cpu"
        return make(*given, **how)

    return made
