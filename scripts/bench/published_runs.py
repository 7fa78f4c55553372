"""Training runs that others published, as rows in our settings; data of `plan_anchors.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

from published_engine import PublishedEngine, published_engine

from jaxdist.hardware import GPUS, Gpu
from jaxdist.models import DecoderConfig


def llama(layers: int, d: int, heads: int, kv: int, mlp: int, vocab: int) -> DecoderConfig:
    """Return the config of a Llama with these sizes."""
    return DecoderConfig(
        vocab_size=vocab,
        d_model=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        mlp_dim=mlp,
        max_seq_len=131072,
    )


def gpt(layers: int, d: int, heads: int, vocab: int, tied: bool = True) -> DecoderConfig:
    """Return the config of a GPT with GELU and an MLP of 4 × d_model."""
    return DecoderConfig(
        vocab_size=vocab,
        d_model=d,
        num_layers=layers,
        num_heads=heads,
        mlp_dim=4 * d,
        max_seq_len=8192,
        norm="layer",
        positions="learned",
        activation="gelu",
        tie_embeddings=tied,
    )


LLAMA2_7B = llama(32, 4096, 32, 32, 11008, 32000)
LLAMA2_13B = llama(40, 5120, 40, 40, 13824, 32000)
LLAMA2_70B = llama(80, 8192, 64, 8, 28672, 32000)
LLAMA3_8B = llama(32, 4096, 32, 8, 14336, 128256)
LLAMA3_70B = llama(80, 8192, 64, 8, 28672, 128256)
LLAMA3_405B = llama(126, 16384, 128, 8, 53248, 128256)
ONE_7B = llama(24, 2048, 16, 8, 8192, 131072)

# TETON: Grand Teton in torchtitan's benchmarks, an H100 with HBM2e at 2.4 TB/s, limited to 500 W.
A100, H100, H200 = GPUS["a100-80"], GPUS["h100"], GPUS["h200"]
TETON = dataclasses.replace(H100, name="h100 500 W", memory_bandwidth=2.4e12, power_w=500.0)
SELECTIVE_OP = "names:qkv,attention,attention_out"  # saves every second product; `up` is recomputed
# save_qkv_proj, as in a MaxText script for Llama2-70B on 256 H100; the sources do not name it.
MAXTEXT_70B = "names:qkv"
OTHERS = published_engine()
FLASH1, FLASH2 = (published_engine(attention=kernel) for kernel in ("flash1", "flash2"))
FLASH2_FP8 = published_engine("float8", "flash2")
# NVIDIA's own stack: TransformerEngine's attention is cuDNN's.
CUDNN, CUDNN_FP8 = published_engine("", "cudnn"), published_engine("float8", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published run.

    Attributes:
        source: publisher of the run.
        what: name of the model.
        model: sizes of the model.
        gpu: the GPU.
        mesh: mesh in our notation.
        seq_len: tokens per row.
        micro_rows: rows of a microbatch on one replica.
        microbatches: accumulation, or microbatches of a pipeline.
        remat: our most similar policy.
        published: tokens/s/GPU; 0 if `step_s` or `mfu_full` is set instead.
        step_s: seconds per step.
        mfu_full: share of 989.4 TFLOP/s, counting full (non-causal) attention.
        assumed: facts that the source does not state.
    """

    source: str
    what: str
    model: DecoderConfig
    gpu: Gpu
    mesh: str
    seq_len: int
    micro_rows: int
    microbatches: int = 1
    remat: str = "none"
    zero: int = 0
    chunks: int = 1
    published: float = 0.0
    step_s: float = 0.0
    mfu_full: float = 0.0
    engine: PublishedEngine = OTHERS
    moment_dtype: str = "float32"
    reduce_dtype: str = "bfloat16"
    assumed: str = ""


_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads from llm-foundry's scripts/train/yamls/pretrain."""


def mpt(row: str) -> Row:
    """Parse a row of llm-foundry's table of MPT models (scripts/train/benchmarking/README.md).

    The format is `size seq gpu GPUs rows×microbatches remat dtype tokens/s/GPU`.
    """
    size, seq, gpu, number, rows, remat, dtype, tokens = row.split()
    model = gpt(*_MPT[size], 50368)
    micro_rows, microbatches = map(int, rows.split("x"))
    return Row(
        source="llm-foundry",
        what=f"MPT {size.upper()}, {seq}" + (", fp8" if dtype == "fp8" else ""),
        model=dataclasses.replace(model, max_seq_len=max(model.max_seq_len, int(seq))),
        gpu=GPUS[gpu],
        mesh=f"fsdp={number}",
        seq_len=int(seq),
        micro_rows=micro_rows,
        microbatches=microbatches,
        remat=remat,
        reduce_dtype="float32" if gpu == "h100" else "bfloat16",
        published=float(tokens),
        engine=FLASH2_FP8 if dtype == "fp8" else FLASH1,
    )


def megatron(what: str, sizes: tuple[int, int, int], mesh: str, tflops: float, **more: Any) -> Row:
    """Return a row of Megatron-LM's weak scaling; TFLOP/s/GPU count full attention."""
    return Row(
        source="Megatron-LM",
        what=f"GPT {what}, 4096",
        model=gpt(*sizes, 131072, tied=False),
        gpu=H100,
        mesh=mesh,
        seq_len=4096,
        zero=1,
        mfu_full=tflops / 989.4,
        assumed="shape from the parameter count; batch; nothing recomputed",
        **{"micro_rows": 1, "microbatches": 8, **more},
    )


def torch(
    source: str,
    what: str,
    model: DecoderConfig,
    gpu: Gpu,
    mesh: str,
    seq_len: int,
    micro_rows: int,
    remat: str,
    tokens: float,
) -> Row:
    """Return a row for a run of PyTorch's FSDP."""
    return Row(
        source=source,
        what=what,
        model=model,
        gpu=gpu,
        mesh=mesh,
        seq_len=seq_len,
        micro_rows=micro_rows,
        remat=remat,
        published=tokens,
        engine=FLASH2,
    )


def maxtext_70b(gpus: int, mesh: str, seconds: float, engine: PublishedEngine = CUDNN) -> Row:
    """Return a row of NVIDIA's MaxText Llama2-70B recipe."""
    fp8 = " fp8" if engine.products_dtype else ""
    return Row(
        source="MaxText (NVIDIA recipe)",
        what=f"Llama2-70B, 4096{fp8}, {gpus} GPUs",
        model=LLAMA2_70B,
        gpu=H100,
        mesh=mesh,
        seq_len=4096,
        micro_rows=2,
        remat=MAXTEXT_70B,
        step_s=seconds,
        engine=engine,
        assumed="remat",
    )


ROWS = [
    Row(
        source="JAX-Toolbox MaxText",
        what="Llama2-7B, 4096",
        model=LLAMA2_7B,
        gpu=H100,
        mesh="fsdp=8",
        seq_len=4096,
        micro_rows=2,
        remat="dots",
        published=11361,
        engine=CUDNN,
    ),
    Row(
        source="MaxText A3 table",
        what="Llama2-7B, 4096",
        model=LLAMA2_7B,
        gpu=H100,
        mesh="fsdp=8",
        seq_len=4096,
        micro_rows=4,
        remat="dots",
        published=10670,
        engine=CUDNN,
        assumed="4 rows, dots",
    ),
    Row(
        source="KempnerForge",
        what="Llama3-8B, 4096",
        model=LLAMA3_8B,
        gpu=H200,
        mesh="dp=1",
        seq_len=4096,
        micro_rows=8,
        remat="full",
        moment_dtype="bfloat16",
        published=10471,
        assumed="8 rows",
    ),
    Row(
        source="torchtitan",
        what="Llama3-8B, 8192, compile",
        model=LLAMA3_8B,
        gpu=TETON,
        mesh="fsdp=8",
        seq_len=8192,
        micro_rows=2,
        remat=SELECTIVE_OP,
        published=6667,
        engine=FLASH2,
    ),
    Row(
        source="torchtitan",
        what="Llama3-8B, 8192, compile, fp8",
        model=LLAMA3_8B,
        gpu=TETON,
        mesh="fsdp=8",
        seq_len=8192,
        micro_rows=2,
        remat=SELECTIVE_OP,
        engine=FLASH2_FP8,
        published=8532,
    ),
    Row(
        source="torchtitan",
        what="Llama3-8B, 8192, compile",
        model=LLAMA3_8B,
        gpu=TETON,
        mesh="fsdp=128",
        seq_len=8192,
        micro_rows=2,
        remat=SELECTIVE_OP,
        published=6514,
        engine=FLASH2,
    ),
    Row(
        source="torchtitan",
        what="Llama3-70B, 8192, fp8",
        model=LLAMA3_70B,
        gpu=TETON,
        mesh="fsdp=32,tp=8",
        seq_len=8192,
        micro_rows=16,
        remat="full",
        engine=FLASH2_FP8,
        published=829,
    ),
    Row(
        source="torchtitan",
        what="Llama3-405B, 8192, fp8, 1F1B",
        model=LLAMA3_405B,
        gpu=TETON,
        mesh="pp=8,fsdp=8,tp=8",
        seq_len=8192,
        micro_rows=1,
        microbatches=32,
        remat="full",
        engine=FLASH2_FP8,
        published=100,
    ),
    Row(
        source="torchtitan",
        what="Llama3-405B, 8192, fp8, interleaved",
        model=LLAMA3_405B,
        gpu=TETON,
        mesh="pp=8,fsdp=8,tp=8",
        seq_len=8192,
        micro_rows=1,
        microbatches=32,
        chunks=2,
        remat="full",
        engine=FLASH2_FP8,
        published=128,
    ),
    Row(
        source="Megatron-LM",
        what="1.7B, 4096, V131072",
        model=ONE_7B,
        gpu=H100,
        mesh="dp=48",
        seq_len=4096,
        micro_rows=4,
        zero=1,
        mfu_full=408.8 / 989.4,
        assumed="4 rows, nothing recomputed",
    ),
    Row(
        source="nanotron",
        what="1.34B, 4096",
        model=llama(18, 2048, 16, 16, 8192, 32768),
        gpu=H100,
        mesh="dp=8",
        seq_len=4096,
        micro_rows=4,
        microbatches=8,
        zero=1,
        mfu_full=0.443,
        engine=FLASH2,
        assumed="shape, batch, nothing recomputed",
    ),
    Row(
        source="nanotron",
        what="3.57B, 4096",
        model=llama(22, 3072, 24, 24, 12288, 32768),
        gpu=H100,
        mesh="dp=8",
        seq_len=4096,
        micro_rows=2,
        microbatches=8,
        zero=1,
        mfu_full=0.467,
        engine=FLASH2,
        assumed="shape, batch, nothing recomputed",
    ),
    Row(
        source="nanotron",
        what="8.86B, 4096",
        model=llama(32, 4096, 32, 32, 16384, 32768),
        gpu=H100,
        mesh="dp=4,tp=2",
        seq_len=4096,
        micro_rows=1,
        microbatches=8,
        zero=1,
        mfu_full=0.452,
        engine=FLASH2,
        assumed="mesh, batch, nothing recomputed",
    ),
    Row(
        source="nanoGPT compile",
        what="GPT-2 XL, 1024",
        model=gpt(48, 1600, 25, 50304),
        gpu=H200,
        mesh="dp=1",
        seq_len=1024,
        micro_rows=16,
        microbatches=16,
        published=49900,
        engine=FLASH2,
        assumed="16 rows × 16",
    ),
    Row(
        source="Megatron-Bridge",
        what="Llama3-8B, 8192, fp8",
        model=LLAMA3_8B,
        gpu=H100,
        mesh="fsdp=8",
        seq_len=8192,
        micro_rows=1,
        microbatches=16,
        engine=CUDNN_FP8,
        published=14451,
        assumed="batch, nothing recomputed",
    ),
    Row(
        source="MaxText",
        what="Llama3.1-70B, 8192, 256 GPUs",
        model=LLAMA3_70B,
        gpu=H200,
        mesh="dp=2,fsdp=128",
        seq_len=8192,
        micro_rows=2,
        remat=MAXTEXT_70B,
        step_s=15.516,
        engine=CUDNN,
        assumed="remat",
    ),
    maxtext_70b(64, "fsdp=64", 6.999),
    maxtext_70b(128, "fsdp=128", 7.072),
    maxtext_70b(256, "fsdp=256", 7.153),
    maxtext_70b(512, "dp=4,fsdp=128", 7.091),
    maxtext_70b(2048, "dp=16,fsdp=128", 7.066),
    maxtext_70b(64, "fsdp=64", 4.324, CUDNN_FP8),
    megatron("7.1B", (30, 4096, 32), "dp=16,tp=2", 466, micro_rows=4),
    megatron("16B", (32, 6144, 48), "dp=16,tp=4", 489, micro_rows=4),
    megatron("32B", (48, 7168, 56), "dp=16,tp=8", 460, micro_rows=4),
    megatron("70B", (84, 8192, 64), "pp=2,dp=16,tp=8", 420, microbatches=16, chunks=7),
    megatron("177B", (96, 12288, 96), "pp=6,dp=16,tp=8", 433, microbatches=24, chunks=4),
    megatron("462B", (112, 18432, 144), "pp=16,dp=16,tp=8", 460, microbatches=64, chunks=7),
    mpt("1b 2048 h100 8 14x1 none bf16 45455"),
    torch("torchtitan", "Llama3-8B, 8192", LLAMA3_8B, A100, "fsdp=64", 8192, 1, SELECTIVE_OP, 2973),
    torch("torchtitan", "Llama3-70B, 8192", LLAMA3_70B, A100, "fsdp=64", 8192, 1, "full", 331),
    torch("torchtitan", "Llama2-13B, 4096", LLAMA2_13B, A100, "fsdp=64", 4096, 2, "none", 2162),
    torch("torchtitan", "Llama2-70B, 4096", LLAMA2_70B, A100, "fsdp=64", 4096, 2, "full", 353),
    torch("fms-fsdp", "Llama2-7B, 4096", LLAMA2_7B, A100, "fsdp=128", 4096, 2, "none", 3700),
    torch("fms-fsdp", "Llama2-7B, 4096", LLAMA2_7B, H100, "fsdp=128", 4096, 2, "none", 9600),
    dataclasses.replace(
        torch(
            "torchtitan (Trainy)",
            "Llama3-8B, 8192, fp8",
            LLAMA3_8B,
            H200,
            "fsdp=32",
            8192,
            2,
            SELECTIVE_OP,
            10938,
        ),
        engine=FLASH2_FP8,
    ),
    mpt("760m 2048 h100 8 24x2 none bf16 63147"),
    mpt("1b 8192 h100 8 3x4 none bf16 29157"),
    mpt("3b 2048 h100 16 10x3 none bf16 24142"),
    mpt("3b 4096 h100 8 5x6 none bf16 20964"),
    mpt("7b 2048 h100 8 6x1 none bf16 10643"),
    mpt("7b 4096 h100 8 16x2 full bf16 8611"),
    mpt("7b 8192 h100 8 8x2 full bf16 6935"),
    mpt("13b 2048 h100 8 2x1 none bf16 4792"),
    mpt("13b 2048 h100 64 2x1 none bf16 4800"),
    mpt("30b 2048 h100 32 14x3 full bf16 2308"),
    mpt("70b 2048 h100 64 8x4 full bf16 1039"),
]

FITTED, HELD_OUT = ROWS[::2], ROWS[1::2]
"""Rows used to fit constants of `jaxdist.plan.estimate.software`, and rows to test them."""

_GPT_SIMPLE = dataclasses.replace(llama(34, 2560, 20, 20, 6912, 50304), tie_embeddings=True)

LATER = [
    Row(
        source="build-nanogpt",
        what="GPT-2 124M, 1024",
        model=gpt(12, 768, 12, 50304),
        gpu=A100,
        mesh="dp=1",
        seq_len=1024,
        micro_rows=16,
        step_s=0.090,
        engine=FLASH2,
        assumed="A100, 16 rows",
    ),
    Row(
        source="ashrafs1/nanogpt",
        what="GPT-2 124M untied, 2048",
        model=gpt(12, 768, 12, 50304, tied=False),
        gpu=A100,
        mesh="dp=1",
        seq_len=2048,
        micro_rows=32,
        microbatches=8,
        published=195_000,
        engine=FLASH2,
        assumed="AdamW for its Muon",
    ),
    Row(
        source="gpt-simple",
        what="2.8B, 2048",
        model=_GPT_SIMPLE,
        gpu=A100,
        mesh="dp=8",
        seq_len=2048,
        micro_rows=4,
        microbatches=8,
        remat="full",
        published=8_125,
        assumed="heads, MLP, vocabulary",
    ),
]
"""Rows collected after the fit. They showed that small models and single GPUs are faster."""
