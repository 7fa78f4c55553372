"""Published tables collected after the constants were fitted, as rows of `published_runs`.

Sources (figures are unchanged):
    llm-foundry, scripts/train/benchmarking/README.md (January 2024), all rows that are not in
        `published_runs` already. The A100 rows date from May and June 2023, the H100 rows from
        October 2023 to January 2024. Its `gpu` extra requires flash-attn 1.0.9 until March 2024;
        its sweep installs 2.4.2 for 8-bit rows. The H100 rows ran Composer 0.16.4 or later, whose
        "DEFAULT" reduces gradients in float32.
    Megatron-Bridge, docs/performance-summary-archive.md (August 2026): dense models on GPUs in
        the planner's catalog; the median if several releases list a setting.
    NeMo, docs/source/performance (24.03 and 24.07): dense models.
    torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 2 and 6.
    OLMo-core 1.7, README.md and src/scripts/train; the number of GPUs is not published.
    fms-fsdp, README.md, with torch.compile. Its "selective" recomputation is nearly full for 34B
        and 70B according to its MFU and HFU. The 13B row is in between and is excluded.
    TinyLlama, README.md and pretrain/tinyllama.py.
    tylerromero.com/posts/nanogpt-speedrun-worklog, the first row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from published_engine import published_engine
from published_runs import (
    A100,
    FLASH2,
    FLASH2_FP8,
    H100,
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    TETON,
    Row,
    gpt,
    llama,
    mpt,
)

from jaxdist.hardware import GPUS
from jaxdist.models import DecoderConfig


def mpts(table: str) -> Iterator[Row]:
    """Yield rows in the format of `published_runs.mpt`, separated by `;`."""
    return map(mpt, table.split(";"))


def bridge(
    size: str,
    gpu: str,
    dtype: str,
    mesh: str,
    micro_rows: int,
    microbatches: int,
    tokens: float,
    chunks: int = 1,
) -> Row:
    """Return a row of Megatron-Bridge with 8,192 tokens; ZeRO 1 if the mesh has no FSDP."""
    models = {"8B": LLAMA3_8B, "70B": LLAMA3_70B, "405B": LLAMA3_405B}
    return Row(
        source="Megatron-Bridge",
        what=f"Llama3-{size}, 8192, {dtype}",
        model=models[size],
        gpu=GPUS[gpu],
        mesh=mesh,
        seq_len=8192,
        micro_rows=micro_rows,
        microbatches=microbatches,
        zero=0 if "fsdp" in mesh else 1,
        chunks=chunks,
        published=tokens,
        engine=published_engine("float4" if dtype == "nvfp4" else "float8", "cudnn"),
        assumed="nothing recomputed",
    )


def olmo(
    what: str, model: DecoderConfig, micro_rows: int, microbatches: int, tokens: float, dtype: str
) -> Row:
    """Return a row of OLMo-core on H100 with 4,096 tokens."""
    narrow = "float8" if dtype == "fp8" else ""
    return Row(
        source="OLMo-core",
        what=f"{what}, 4096" + (", fp8" if narrow else ""),
        model=model,
        gpu=H100,
        mesh="fsdp=64",
        seq_len=4096,
        micro_rows=micro_rows,
        microbatches=microbatches,
        reduce_dtype="float32",
        published=tokens,
        engine=published_engine(narrow, "flash2"),
        assumed="64 GPUs",
    )


def fms(what: str, model: DecoderConfig, gpus: int, remat: str, tokens: float) -> Row:
    """Return a row of fms-fsdp: 128 A100 with 400 Gbit/s per node, or 96 H100 with 800."""
    gpu, rate = (A100, 400) if gpus == 128 else (H100, 800)
    return Row(
        source="fms-fsdp",
        what=f"{what}, 4096, compile",
        model=model,
        gpu=dataclasses.replace(gpu, network_bandwidth=rate / 8 / 8 * 1e9),
        mesh="dp=16,fsdp=8" if remat == "none" else f"fsdp={gpus}",
        seq_len=4096,
        micro_rows=2,
        remat=remat,
        published=tokens,
        engine=FLASH2,
    )


_LLAMA_34B = llama(48, 8192, 64, 8, 22016, 32000)
_OLMO_1B = llama(18, 2048, 16, 16, 5632, 100352)
_OLMO_7B = llama(32, 4096, 32, 32, 11008, 100352)
_OLMO_13B = llama(40, 5120, 40, 40, 13824, 100352)

EXPLORED = [
    *mpts(
        """
30b 2048 h100 512 8x1 full bf16 2115; 30b 2048 h100 128 8x1 full bf16 2199;
13b 2048 h100 512 16x1 full bf16 4952; 13b 2048 h100 128 16x1 full bf16 5080;
7b 2048 h100 512 6x1 none bf16 9670; 3b 2048 h100 128 8x1 none bf16 23422;
1b 2048 h100 512 12x1 none bf16 39837; 70b 2048 h100 32 2x16 full bf16 882;
30b 8192 h100 8 1x21 full bf16 1384; 30b 2048 h100 8 3x21 full bf16 2002;
30b 1024 h100 8 6x21 full bf16 2084; 13b 32768 h100 8 1x3 full bf16 1976;
13b 16384 h100 8 3x3 full bf16 2985; 13b 2048 h100 32 2x1 none bf16 4811;
13b 2048 h100 16 2x1 none bf16 4767; 7b 1024 h100 8 64x2 full bf16 10203;
3b 65536 h100 8 1x2 full bf16 3262; 3b 32768 h100 8 3x6 full bf16 5873;
3b 16384 h100 8 1x6 none bf16 11152; 3b 1024 h100 8 20x6 none bf16 27046;
1b 16384 h100 8 2x4 none bf16 19649; 1b 2048 h100 64 20x1 none bf16 44402;
760m 32768 h100 8 1x2 none bf16 16291; 760m 16384 h100 8 3x2 none bf16 27815;
760m 4096 h100 8 12x2 none bf16 55459; 760m 2048 h100 32 24x1 none bf16 67971;
760m 2048 h100 16 24x1 none bf16 68551; 760m 512 h100 8 96x2 none bf16 83749;
3b 8192 h100 8 3x6 none fp8 19146; 3b 2048 h100 8 10x6 none fp8 30586;
1b 32768 h100 8 1x4 none fp8 12580; 70b 2048 a100-80 64 8x4 full bf16 410;
70b 2048 a100-80 32 2x16 full bf16 373; 30b 4096 a100-80 8 1x21 full bf16 814;
30b 2048 a100-80 8 3x21 full bf16 916; 30b 512 a100-80 8 12x21 full bf16 967;
13b 32768 a100-80 8 1x3 full bf16 1016; 13b 4096 a100-80 8 10x3 full bf16 2060;
13b 1024 a100-80 8 40x3 full bf16 2330; 7b 65536 a100-80 8 1x2 full bf16 1013;
7b 8192 a100-80 8 8x2 full bf16 3206; 3b 16384 a100-80 8 1x6 none bf16 5529;
3b 8192 a100-80 8 3x6 none bf16 7695; 3b 4096 a100-80 8 5x6 none bf16 9457;
3b 1024 a100-80 8 20x6 none bf16 11580; 1b 32768 a100-80 8 1x4 none bf16 6275;
1b 16384 a100-80 8 2x4 none bf16 9956; 1b 4096 a100-80 8 7x4 none bf16 17807;
1b 2048 a100-80 8 14x4 none bf16 20513; 760m 65536 a100-80 8 1x2 full bf16 4143;
760m 4096 a100-80 8 12x2 none bf16 27351; 760m 2048 a100-80 8 24x2 none bf16 32434;
760m 1024 a100-80 8 48x2 none bf16 29765; 760m 512 a100-80 8 96x2 none bf16 29446;
350m 8192 a100-80 8 8x2 none bf16 36569; 350m 2048 a100-80 8 32x2 none bf16 58782;
350m 1024 a100-80 8 64x2 none bf16 64813; 350m 512 a100-80 8 128x2 none bf16 69330;
125m 8192 a100-80 8 8x2 none bf16 90392; 125m 1024 a100-80 8 64x2 none bf16 156468;
125m 512 a100-80 8 128x2 none bf16 165681; 30b 2048 a100-40 128 6x1 full bf16 865;
30b 2048 a100-40 32 4x1 full bf16 857; 13b 4096 a100-40 8 2x16 full bf16 1603;
13b 2048 a100-40 128 16x1 full bf16 1972; 13b 2048 a100-40 32 14x1 full bf16 1998;
13b 2048 a100-40 8 4x16 full bf16 1668; 7b 8192 a100-40 8 3x4 full bf16 2887;
7b 2048 a100-40 128 18x1 full bf16 3623; 7b 512 a100-40 8 48x4 full bf16 3895;
3b 32768 a100-40 8 1x4 full bf16 2955; 3b 4096 a100-40 8 2x8 none bf16 8777;
3b 2048 a100-40 128 6x1 none bf16 9538; 3b 1024 a100-40 8 10x8 none bf16 10731;
3b 512 a100-40 8 20x8 none bf16 11324; 1b 16384 a100-40 8 1x8 none bf16 9715;
1b 2048 a100-40 128 10x1 none bf16 18647; 1b 2048 a100-40 32 10x1 none bf16 15555;
1b 2048 a100-40 16 8x1 none bf16 19085; 1b 2048 a100-40 8 8x8 none bf16 19271;
760m 32768 a100-40 8 1x4 full bf16 7183; 760m 16384 a100-40 8 1x4 none bf16 13914;
760m 8192 a100-40 8 3x4 none bf16 20106; 760m 2048 a100-40 32 12x1 none bf16 29648;
760m 1024 a100-40 8 24x4 none bf16 33422; 760m 512 a100-40 8 48x4 none bf16 34938;
350m 8192 a100-40 8 4x4 none bf16 34933; 350m 2048 a100-40 8 16x4 none bf16 55995;
350m 512 a100-40 8 64x4 none bf16 66284; 125m 4096 a100-40 8 13x3 none bf16 115162;
125m 2048 a100-40 128 26x1 none bf16 123936; 125m 2048 a100-40 16 26x1 none bf16 130535;
125m 2048 a100-40 8 26x3 none bf16 136334; 125m 1024 a100-40 8 52x3 none bf16 148289;
125m 512 a100-40 8 104x3 none bf16 156735
"""
    ),
    bridge("70B", "gb200", "fp8", "fsdp=64", 2, 2, 4224),
    bridge("70B", "gb200", "fp8", "fsdp=64", 2, 1, 3986),
    bridge("70B", "gb200", "mxfp8", "pp=4,dp=8,tp=2", 1, 32, 3770, chunks=5),
    bridge("405B", "gb200", "nvfp4", "pp=16,dp=4,tp=4", 1, 384, 1083, chunks=4),
    bridge("70B", "h100", "fp8", "pp=8,dp=2,tp=4", 1, 64, 1610, chunks=5),
]
"""Half of two tables, selected by a hash of each row. These rows were examined one by one while the
estimate was corrected."""

UNSEEN = [
    *mpts(
        """
70b 2048 h100 512 8x1 full bf16 1007; 70b 2048 h100 256 8x1 full bf16 1035;
70b 2048 h100 128 8x1 full bf16 1058; 30b 2048 h100 256 8x1 full bf16 2148;
13b 2048 h100 256 16x1 full bf16 4989; 7b 2048 h100 256 6x1 none bf16 10119;
7b 2048 h100 128 6x1 none bf16 10475; 3b 2048 h100 512 8x1 none bf16 21664;
3b 2048 h100 256 8x1 none bf16 22772; 1b 2048 h100 256 12x1 none bf16 42555;
1b 2048 h100 128 12x1 none bf16 44123; 30b 4096 h100 8 1x21 full bf16 1802;
30b 2048 h100 16 10x3 full bf16 2263; 13b 4096 h100 8 10x3 full bf16 4717;
13b 1024 h100 8 40x3 full bf16 5502; 7b 65536 h100 8 1x2 full bf16 1956;
7b 32768 h100 8 2x2 full bf16 3318; 3b 8192 h100 8 3x6 none bf16 16578;
3b 2048 h100 64 6x3 none bf16 22525; 3b 2048 h100 32 6x3 none bf16 23021;
3b 512 h100 8 40x6 none bf16 27965; 1b 65536 h100 8 1x2 full bf16 5506;
1b 32768 h100 8 1x4 none bf16 12025; 1b 4096 h100 8 7x4 none bf16 38535;
1b 2048 h100 32 20x1 none bf16 45130; 1b 2048 h100 16 20x1 none bf16 46037;
1b 1024 h100 8 18x4 none bf16 48910; 1b 512 h100 8 56x4 none bf16 52275;
760m 8192 h100 8 6x2 none bf16 41825; 760m 1024 h100 8 48x2 none bf16 78581;
3b 32768 h100 8 3x6 full fp8 5856; 3b 512 h100 8 40x6 none fp8 36527;
1b 8192 h100 8 2x4 none fp8 32010; 1b 512 h100 8 56x4 none fp8 70315;
30b 8192 a100-80 8 1x21 full bf16 574; 30b 1024 a100-80 8 6x21 full bf16 946;
13b 16384 a100-80 8 3x3 full bf16 1431; 13b 8192 a100-80 8 5x3 full bf16 1795;
13b 2048 a100-80 8 2x3 none bf16 2262; 7b 32768 a100-80 8 2x2 full bf16 1672;
7b 16384 a100-80 8 4x2 full bf16 2453; 7b 4096 a100-80 8 16x2 full bf16 3684;
7b 2048 a100-80 8 6x2 none bf16 4641; 7b 1024 a100-80 8 64x2 full bf16 4357;
3b 65536 a100-80 8 1x2 full bf16 1767; 3b 32768 a100-80 8 3x6 full bf16 3029;
3b 2048 a100-80 8 10x2 none bf16 10811; 3b 512 a100-80 8 40x6 none bf16 12127;
1b 65536 a100-80 8 1x2 full bf16 3044; 1b 8192 a100-80 8 3x4 none bf16 13814;
1b 1024 a100-80 8 18x4 none bf16 22112; 1b 512 a100-80 8 56x4 none bf16 23148;
760m 32768 a100-80 8 1x2 none bf16 8802; 760m 16384 a100-80 8 3x2 none bf16 14274;
760m 8192 a100-80 8 6x2 none bf16 20933; 350m 65536 a100-80 8 1x2 none bf16 7524;
350m 32768 a100-80 8 2x2 none bf16 13652; 350m 16384 a100-80 8 4x2 none bf16 23559;
350m 4096 a100-80 8 16x2 none bf16 49555; 125m 65536 a100-80 8 1x2 none bf16 20368;
125m 32768 a100-80 8 2x2 none bf16 36407; 125m 16384 a100-80 8 4x2 none bf16 60040;
125m 4096 a100-80 8 16x2 none bf16 118396; 125m 2048 a100-80 8 40x2 none bf16 142830;
125m 2048 a100-80 8 32x2 none bf16 141737; 70b 2048 a100-40 128 4x1 full bf16 376;
70b 2048 a100-40 64 2x1 full bf16 276; 13b 8192 a100-40 8 1x16 full bf16 1407;
13b 2048 a100-40 64 16x1 full bf16 1976; 13b 2048 a100-40 16 10x1 full bf16 1993;
13b 1024 a100-40 8 8x16 full bf16 1727; 13b 512 a100-40 8 16x16 full bf16 1763;
7b 16384 a100-40 8 1x4 full bf16 2249; 7b 4096 a100-40 8 6x4 full bf16 3366;
7b 2048 a100-40 64 18x1 full bf16 3665; 7b 2048 a100-40 32 18x1 full bf16 3725;
7b 2048 a100-40 16 16x1 full bf16 3645; 7b 2048 a100-40 8 12x4 full bf16 3679;
7b 1024 a100-40 8 24x4 full bf16 3854; 3b 16384 a100-40 8 2x8 full bf16 4465;
3b 8192 a100-40 8 1x8 none bf16 7149; 3b 2048 a100-40 64 6x1 none bf16 9736;
3b 2048 a100-40 32 6x1 none bf16 9914; 3b 2048 a100-40 16 5x1 none bf16 9750;
3b 2048 a100-40 8 5x8 none bf16 10065; 1b 32768 a100-40 8 1x4 full bf16 5095;
1b 8192 a100-40 8 2x8 none bf16 13474; 1b 4096 a100-40 8 4x8 none bf16 16856;
1b 2048 a100-40 64 10x1 none bf16 19001; 1b 1024 a100-40 8 16x8 none bf16 20959;
1b 512 a100-40 8 32x8 none bf16 21782; 760m 4096 a100-40 8 6x4 none bf16 25863;
760m 2048 a100-40 128 12x1 none bf16 28940; 760m 2048 a100-40 64 12x1 none bf16 29344;
760m 2048 a100-40 16 12x1 none bf16 29607; 760m 2048 a100-40 8 12x4 none bf16 30173;
350m 32768 a100-40 8 1x4 none bf16 13416; 350m 16384 a100-40 8 2x4 none bf16 22896;
350m 4096 a100-40 8 8x4 none bf16 46833; 350m 2048 a100-40 128 18x1 none bf16 51934;
350m 2048 a100-40 64 18x1 none bf16 52689; 350m 2048 a100-40 32 18x1 none bf16 53811;
350m 2048 a100-40 16 18x1 none bf16 55413; 350m 1024 a100-40 8 32x4 none bf16 62523;
125m 32768 a100-40 8 1x4 none bf16 32651; 125m 16384 a100-40 8 2x3 none bf16 55484;
125m 8192 a100-40 8 5x3 none bf16 86858; 125m 2048 a100-40 64 26x1 none bf16 125234;
125m 2048 a100-40 32 26x1 none bf16 127122
"""
    ),
    bridge("405B", "gb200", "fp8", "pp=16,dp=4,tp=4", 1, 384, 830, chunks=4),
    bridge("405B", "gb200", "mxfp8", "pp=16,dp=4,tp=4", 1, 384, 786, chunks=8),
    bridge("405B", "gb200", "nvfp4", "pp=16,dp=4,tp=4", 1, 384, 1151, chunks=8),
    bridge("405B", "gb200", "fp8", "fsdp=64,tp=2", 1, 1, 729),
    bridge("70B", "gb200", "nvfp4", "pp=4,dp=8,tp=2", 1, 32, 4710, chunks=5),
    bridge("8B", "gb200", "fp8", "dp=8", 2, 8, 31432),
    bridge("405B", "h100", "fp8", "pp=8,dp=8,cp=2,tp=8", 1, 192, 326, chunks=8),
    bridge("405B", "h100", "fp8", "pp=8,dp=8,cp=2,tp=8", 1, 64, 297, chunks=8),
    bridge("70B", "h100", "fp8", "pp=8,dp=2,tp=4", 1, 128, 1636, chunks=5),
    bridge("8B", "b200", "fp8", "dp=8", 2, 8, 30309),
    bridge("405B", "b200", "fp8", "pp=8,dp=2,cp=2,tp=4", 1, 32, 662, chunks=8),
]
"""The other half. Before the corrections were complete, only their total was examined, and no
single row."""

ELSEWHERE = [
    olmo("1B", _OLMO_1B, 8, 2, 55000, "bf16"),
    olmo("1B", _OLMO_1B, 8, 2, 65000, "fp8"),
    olmo("7B", _OLMO_7B, 2, 8, 10000, "bf16"),
    olmo("7B", _OLMO_7B, 2, 8, 13000, "fp8"),
    olmo("13B", _OLMO_13B, 1, 32, 4600, "bf16"),
    olmo("13B", _OLMO_13B, 1, 32, 5500, "fp8"),
    olmo("Llama3-8B", LLAMA3_8B, 2, 8, 9500, "bf16"),
    olmo("Llama3-8B", LLAMA3_8B, 2, 8, 12500, "fp8"),
    fms("Llama2-7B", LLAMA2_7B, 128, "none", 4550),
    fms("Llama-34B", _LLAMA_34B, 128, "full", 820),
    fms("Llama-34B", _LLAMA_34B, 96, "full", 1830),
    fms("Llama2-70B", LLAMA2_70B, 128, "full", 410),
    fms("Llama2-70B", LLAMA2_70B, 96, "full", 890),
    Row(
        source="TinyLlama",
        what="1.1B, 2048",
        model=llama(22, 2048, 32, 4, 5632, 32000),
        gpu=GPUS["a100-40"],
        mesh="fsdp=16",
        seq_len=2048,
        micro_rows=8,
        microbatches=4,
        published=24000,
        engine=FLASH2,
    ),
    Row(
        source="tylerromero",
        what="GPT-2 124M, 1024",
        model=gpt(12, 768, 12, 50257),
        gpu=GPUS["rtx-4090"],
        mesh="dp=2",
        seq_len=1024,
        micro_rows=32,
        microbatches=8,
        published=110350,
        engine=FLASH2,
        assumed="32 rows × 8",
    ),
]
"""Other trainers, added last and predicted with known kernels. The 4090's row then led to the
higher clock of GeForce GPUs."""

_GPT_5B = gpt(24, 4096, 32, 51200, tied=False)
_GPT_20B = gpt(44, 6144, 48, 51200, tied=False)
_GPT_175B = gpt(96, 12288, 96, 51200, tied=False)
_NEMOTRON_340B = dataclasses.replace(gpt(96, 18432, 96, 256000, tied=False), num_kv_heads=8)


def nvidia(
    source: str,
    model: DecoderConfig,
    what: str,
    mesh: str,
    rows: tuple[int, int],
    tokens: float = 0.0,
    **more: Any,
) -> Row:
    """Return a row of NVIDIA's stack on H100; `what` names the dtype; rows × microbatches."""
    return Row(
        source=source,
        what=what,
        model=model,
        gpu=H100,
        mesh=mesh,
        micro_rows=rows[0],
        microbatches=rows[1],
        zero=1,
        published=tokens,
        engine=published_engine("float8" if "fp8" in what else "", "cudnn"),
        **{"seq_len": 4096, "assumed": "nothing recomputed", **more},
    )


def nemo_long(thousands: int, mesh: str, tflops: float) -> Row:
    """Return a row of NeMo's table of long rows; TFLOP/s/GPU count full attention."""
    return nvidia(
        "NeMo 24.03",
        LLAMA2_7B,
        f"Llama2-7B, {thousands}k, fp8",
        mesh,
        (1, 8),
        seq_len=1024 * thousands,
        mfu_full=tflops / 989.4,
        assumed="8 microbatches, nothing recomputed",
    )


def titan(size: str, thousands: int, mesh: str, rows: tuple[int, int], tokens: float) -> Row:
    """Return a row of torchtitan's tables of long rows on H100 with 500 W, in 8 bits."""
    return Row(
        source="torchtitan",
        what=f"Llama3-{size}, {thousands}k, fp8",
        model=LLAMA3_8B if size == "8B" else LLAMA3_405B,
        gpu=TETON,
        mesh=mesh,
        seq_len=1024 * thousands,
        micro_rows=rows[0],
        microbatches=rows[1],
        remat="full",
        published=tokens,
        engine=FLASH2_FP8,
    )


NEW = [
    bridge("8B", "gb300", "fp8", "dp=8", 2, 8, 37556),
    bridge("8B", "gb300", "mxfp8", "dp=8", 2, 8, 36108),
    bridge("70B", "gb300", "nvfp4", "pp=4,dp=16", 1, 16, 6798, chunks=5),
    bridge("70B", "gb300", "mxfp8", "pp=4,dp=16", 1, 16, 4596, chunks=5),
    bridge("70B", "gb300", "fp8", "fsdp=64", 2, 2, 5003),
    bridge("405B", "gb300", "nvfp4", "pp=8,dp=8,tp=4", 1, 192, 1333, chunks=4),
    bridge("405B", "gb300", "mxfp8", "pp=8,dp=8,cp=2,tp=2", 1, 192, 931, chunks=4),
    bridge("405B", "gb300", "fp8", "pp=8,dp=8,tp=4", 1, 192, 988, chunks=4),
    nvidia("NeMo 24.07", _GPT_5B, "GPT3-5B, fp8", "dp=64", (4, 8), 22521, seq_len=2048),
    nvidia("NeMo 24.07", _GPT_20B, "GPT3-20B, fp8", "dp=32,tp=2", (2, 4), 5851, seq_len=2048),
    *(
        nvidia(
            "NeMo 24.07",
            _GPT_175B,
            f"GPT3-175B, fp8, {32 * replicas}",
            f"pp=8,dp={replicas},tp=4",
            (rows, 64),
            tokens,
            seq_len=2048,
            chunks=6,
        )
        for replicas, rows, tokens in ((4, 1, 726), (16, 2, 782))
    ),
    nvidia("NeMo 24.07", LLAMA2_7B, "Llama2-7B, fp8", "dp=8", (1, 16), 16847),
    nvidia("NeMo 24.07", LLAMA2_13B, "Llama2-13B, fp8", "pp=4,dp=4", (1, 32), 8646, chunks=10),
    nvidia("NeMo 24.07", LLAMA2_70B, "Llama2-70B, fp8", "pp=4,dp=4,tp=4", (1, 32), 1707, chunks=20),
    nvidia(
        "NeMo 24.07",
        _NEMOTRON_340B,
        "Nemotron-340B, fp8",
        "pp=8,dp=2,tp=8",
        (1, 16),
        322,
        chunks=12,
    ),
    nvidia("NeMo 24.07", LLAMA3_8B, "Llama3-8B, fp8", "dp=4,cp=2", (1, 32), 12036, seq_len=8192),
    nvidia(
        "NeMo 24.07",
        LLAMA3_70B,
        "Llama3-70B, fp8",
        "pp=4,dp=2,cp=2,tp=4",
        (1, 64),
        1533,
        seq_len=8192,
        chunks=5,
    ),
    nvidia(
        "Megatron-Bridge",
        LLAMA3_8B,
        "Llama3-8B, bf16",
        "dp=4,cp=2",
        (1, 32),
        10253,
        seq_len=8192,
    ),
    nvidia(
        "Megatron-Bridge",
        LLAMA3_405B,
        "Llama3-405B, bf16",
        "pp=8,dp=4,cp=2,tp=8",
        (1, 64),
        206.8,
        seq_len=8192,
        chunks=8,
    ),
    nvidia(
        "Megatron-Bridge",
        _NEMOTRON_340B,
        "Nemotron-340B, bf16",
        "pp=8,dp=4,tp=8",
        (1, 16),
        step_s=4.31,
        chunks=12,
        assumed="64 rows, nothing recomputed",
    ),
    nemo_long(4, "dp=4", 768),
    nemo_long(8, "pp=2,dp=4", 730),
    nemo_long(16, "dp=8,tp=2", 660),
    nemo_long(32, "dp=8,cp=2,tp=2", 610),
    nemo_long(64, "dp=8,cp=2,tp=4", 574),
    nemo_long(128, "dp=8,cp=4,tp=4", 555),
    nemo_long(256, "dp=8,cp=8,tp=4", 549),
    nemo_long(512, "dp=4,cp=16,tp=8", 549),
    nemo_long(1024, "dp=4,cp=32,tp=8", 536),
    titan("8B", 32, "fsdp=8", (1, 1), 3890),
    titan("8B", 64, "fsdp=4,cp=2", (1, 1), 2540),
    titan("8B", 128, "fsdp=2,cp=4", (1, 1), 1071),
    titan("8B", 256, "cp=8", (1, 1), 548),
    titan("405B", 32, "pp=8,fsdp=8,tp=8", (1, 8), 76),
    titan("405B", 64, "pp=8,fsdp=4,cp=2,tp=8", (1, 8), 47),
    titan("405B", 128, "pp=8,fsdp=2,cp=4,tp=8", (1, 8), 31),
    titan("405B", 256, "pp=8,cp=8,tp=8", (1, 8), 16),
]
"""Predicted on 2026-11-26 for the first time, with unchanged constants."""
