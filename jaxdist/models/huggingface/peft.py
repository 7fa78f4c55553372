"""Translate adapters to PEFT's directory format, as PEFT 0.21 writes it, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdist.models.adapters import EXPERTS, ROUTER, LoraConfig, parameter_targets, products_of
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface.families import family_of
from jaxdist.models.huggingface.tensors import Source, pieces
from jaxdist.settings import ConfigError, problems_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."

SCORE = f"{_PREFIX}score.weight"
"""PEFT's tensor of a score head, [num_labels, d_model]."""

_KINDS = {"a": "lora_A.weight", "b": "lora_B.weight", "scale": "lora_magnitude_vector"}
"""Our array of an adapter -> its name in PEFT."""

_HARMLESS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "auto_mapping": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "use_qalora": False,
    "velora_config": None,
}
"""Key -> the only supported value besides null, [] and {}."""

_TYPES: dict[str, tuple[type, ...]] = {
    "lora_alpha": (int, float),
    "modules_to_save": (list,),
    "r": (int,),
    "rank_pattern": (dict,),
    "target_modules": (list, str),
    "target_parameters": (list,),
    "trainable_token_indices": (dict, list),
}
"""Key -> the types of its value. Elements of lists are strings, and integers in the last one."""

_IGNORED = ("megatron_core", "peft_version", "qalora_group_size", "revision")


class AdaptedModule(NamedTuple):
    """An adapted module of one layer: its names here and in PEFT, and its tensor's dims.

    `array` is like "params/layers/attention/qkv/adapters/q_proj"; `source` is the tensor of the
    module's weight, whose view has `num_inputs` of our leading dims. For a parameter of all
    experts of the layer it is our array [experts, inputs, *outputs], and PEFT stacks A by expert
    and then rank, but B by rank and then expert. `layer` is the index of the layer in our array.
    """

    array: str
    name: str
    layer: int | tuple[()]
    source: Source
    num_inputs: int
    num_experts: int = 0

    @property
    def target(self) -> str:
        """Name in `lora.targets`."""
        return self.array.rpartition("/")[2]

    def to_peft(self, adapter: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return name -> PEFT's A [rank, inputs], B [outputs, rank], DoRA's magnitudes [outputs].

        With experts, `rank` is the sum of theirs.
        """
        (ins, outs), a, b = self._orders, adapter["a"], adapter["b"]
        if self.num_experts:  # a [experts, inputs, rank], b [experts, rank, *outputs]
            rows = a.swapaxes(1, 2).reshape(-1, a.shape[1])
            columns = np.moveaxis(b, (1, 0), (-2, -1)).reshape(-1, rows.shape[0])
            return {self.tensor_name("a"): rows, self.tensor_name("b"): columns}
        values: dict[str, np.ndarray] = {
            "a": a.transpose([*ins, len(ins)]).reshape(-1, a.shape[-1]).T,
            "b": b.transpose([*(1 + i for i in outs), 0]).reshape(-1, b.shape[0]),
        }
        if "scale" in adapter:
            values["scale"] = adapter["scale"].transpose(outs).reshape(-1)
        return {self.tensor_name(kind): x for kind, x in values.items()}

    def from_peft(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return our arrays [*dims] of PEFT's tensors; the inverse of `to_peft`."""
        (ins, outs), view, order = self._orders, self.source.view, self.source.order
        sizes = [view[dim] for dim in order]
        stored_in = [sizes[i] for i in ins]
        stored_out = [sizes[self.num_inputs + i] for i in outs]
        back_in, back_out = np.argsort(ins), np.argsort(outs)
        a, b = tensors[self.tensor_name("a")], tensors[self.tensor_name("b")]
        if count := self.num_experts:
            split = b.reshape(*view[2:], -1, count)
            return {
                "a": a.reshape(count, -1, a.shape[1]).swapaxes(1, 2),
                "b": np.moveaxis(split, (-2, -1), (1, 0)),
            }
        adapter = {
            "a": a.T.reshape(*stored_in, a.shape[0]).transpose([*back_in, len(ins)]),
            "b": b.reshape(*stored_out, b.shape[1]).transpose([len(outs), *back_out]),
        }
        if (scale := tensors.get(self.tensor_name("scale"))) is not None:
            adapter["scale"] = scale.reshape(stored_out).transpose(back_out)
        return adapter

    def shapes(self, lora: LoraConfig, rank: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of PEFT's tensors for an adapter of this module and `rank`."""
        view, order = self.source.view, self.source.order
        if count := self.num_experts:
            a, b = (count * rank, view[1]), (math.prod(view[2:]), count * rank)
            return {self.tensor_name("a"): a, self.tensor_name("b"): b}
        num_inputs = math.prod(view[dim] for dim in order[: self.num_inputs])
        num_outputs = math.prod(view) // num_inputs
        shapes: dict[str, tuple[int, ...]] = {"a": (rank, num_inputs), "b": (num_outputs, rank)}
        if lora.variant == "dora":
            shapes["scale"] = (num_outputs,)
        return {self.tensor_name(kind): shape for kind, shape in shapes.items()}

    def tensor_name(self, kind: str) -> str:
        """Return PEFT's tensor name of the adapter's array `kind`: "a", "b" or "scale"."""
        return f"{_PREFIX}{self.name}.{_KINDS[kind]}"

    @property
    def _orders(self) -> tuple[list[int], list[int]]:
        order, count = self.source.order, self.num_inputs
        ins, outs = order[:count], order[count:]
        return list(np.argsort(ins)), list(np.argsort(outs))


def modules(model: DecoderConfig, lora: LoraConfig) -> Iterator[AdaptedModule]:
    """Yield the modules with an adapter, of each layer."""
    ranks = lora.target_modules(model)
    products = {f"params/{name}": product for name, product in products_of(model).items()}
    experts = [n for n in EXPERTS if n in ranks]  # PEFT wraps the first by the second
    for piece in pieces(model, family_of(model)):
        if (product := products.get(piece.name)) is None:
            continue
        index = () if piece.layer is None else piece.layer
        layer = ".".join(piece.sources[0].name.split(".")[:3])  # model.layers.0
        for name in (name for name in product.names if name in ranks):
            array = f"{piece.name}/adapters/{name}"
            if product.has_experts:
                inner = ".base_layer" if name != experts[-1] else ""
                module = f"{layer}.mlp.experts{inner}"
                stacked = Source(module, piece.shape, piece.shape, tuple(range(len(piece.shape))))
                yield AdaptedModule(array, module, index, stacked, 1, model.num_experts)
                continue
            end = _in_peft(name, model).removesuffix(".weight")
            named = (s for s in piece.sources if s.name.endswith(f".{end}.weight"))
            source = piece.sources[0] if name == ROUTER else next(named)
            module = f"{layer}.{end}" if name == ROUTER else source.name.removesuffix(".weight")
            yield AdaptedModule(array, module, index, source, len(product.inputs))


def _in_peft(target: str, model: DecoderConfig) -> str:
    """Return the end of the name in PEFT of a target: of a module, or of a parameter."""
    family = family_of(model)
    if target == ROUTER:
        return f"mlp.{'router' if family == 'gpt_oss' else 'gate'}.weight"
    if model.num_experts and target in EXPERTS:
        return f"mlp.experts.{target}"
    return target.replace("expert.", "experts.") if family == "dots1" else target


def token_tables(model: DecoderConfig, lora: LoraConfig) -> dict[str, str]:
    """Return our arrays of the rows [tokens, d_model] of `token_ids` -> Hugging Face's module."""
    if not lora.token_ids:
        return {}
    names = {"params/embed/table", "params/head/kernel"}
    return {
        f"{piece.name}/rows": piece.sources[0].name.removesuffix(".weight")
        for piece in pieces(model, family_of(model))
        if piece.name in names
    }


def rows_name(module: str) -> str:
    """Return PEFT's name of the rows of a module of `token_tables`."""
    return f"{_PREFIX}{module}.token_adapter.trainable_tokens_delta"


def write_config(model: DecoderConfig, lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the `adapter_config.json` of adapters."""
    ranks = {_in_peft(name, model): rank for name, rank in lora.target_modules(model).items()}
    parameters = [_in_peft(name, model) for name in parameter_targets(lora, model)]
    return {
        **_HARMLESS,
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.num_labels else "CAUSAL_LM",
        "modules_to_save": ["score"] if model.num_labels else None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [name for name in ranks if name not in parameters],
        "target_parameters": parameters or None,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != lora.rank},
        "alpha_pattern": {},
        "trainable_token_indices": _token_indices(model, lora.token_ids),
        "use_dora": lora.variant == "dora",
        "use_rslora": lora.variant == "rslora",
        "fan_in_fan_out": family_of(model) == "gpt2",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def rename_problems(model: DecoderConfig, lora: LoraConfig) -> list[str]:
    """Return an error message if PEFT would give adapters to other modules.

    PEFT 0.21 takes these names for those of unfused experts in transformers 4, in some families.
    """
    moved = [n for n in lora.target_modules(model) if n.startswith(("mlp.", "shared_expert."))]
    if not (moved and model.num_experts and family_of(model) in ("dots1", "qwen3_moe")):
        return []
    return [
        f"PEFT would give the adapters of {', '.join(moved)} to experts, which once had such "
        "names. Use convert merge, then to-hf, or leave these out of lora.targets."
    ]


def read_config(peft: Mapping[str, Any], model: DecoderConfig, source: str) -> LoraConfig:
    """Return our settings of an `adapter_config.json`, dropout 0; `ConfigError` if unsupported."""
    if malformed := [key for key in _TYPES if key in peft and not _is_valid(key, peft[key])]:
        expected = lambda key: " or ".join(kind.__name__ for kind in _TYPES[key])
        raise ConfigError(
            [f"{source}: {key}={peft[key]!r}: {expected(key)} is needed." for key in malformed]
        )
    problems = [
        f"{key}={value!r} is not supported. Only {_HARMLESS[key]!r} is."
        for key, value in peft.items()
        if key in _HARMLESS and value not in (_HARMLESS[key], None, [], {})
    ]
    supported = {*write_config(model, LoraConfig(), source), *_IGNORED}
    problems += [
        f"the key {key!r} with value {value!r} is unknown. Remove it if it has no effect."
        for key, value in peft.items()
        if key not in supported and value not in (None, False, {}, [])
    ]
    if peft.get("peft_type") != "LORA":
        problems.append(f"peft_type={peft.get('peft_type')!r}. Only LORA is supported.")
    if peft.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        problems.append(
            f"init_lora_weights={peft['init_lora_weights']!r} also changes the base "
            "weights. Save it with PEFT's path_initial_model_for_weight_conversion first."
        )
    every = _every(model)
    names = list(every.target_modules(model))
    targets = _targets(peft.get("target_modules"), model, source)
    parameters = peft.get("target_parameters") or []
    allowed = {_in_peft(name, model): name for name in parameter_targets(every, model)}
    if wrong := [name for name in parameters if name not in allowed]:
        problems.append(
            f"target_parameters has {', '.join(wrong)}, which cannot have an adapter "
            f"here. Supported are: {', '.join(allowed) or 'none'}."
        )
    targets += [allowed[name] for name in parameters if name in allowed]
    if not targets:
        problems.append(f"target_modules matches none of {', '.join(names)}.")
    saved = peft.get("modules_to_save") or []
    if set(saved) - {"classifier", "score"} or (saved and peft.get("task_type") != "SEQ_CLS"):
        problems.append(f"modules_to_save={saved!r} is not supported. Only SEQ_CLS's score is.")
    if peft.get("alpha_pattern"):
        problems.append("alpha_pattern is not supported: use one lora_alpha.")
    if peft.get("use_dora") and peft.get("use_rslora"):
        problems.append("use_dora together with use_rslora is not supported.")
    if problems:
        raise ConfigError([f"{source}: {problem}" for problem in problems])
    indices = peft.get("trainable_token_indices") or {}
    if isinstance(indices, list):  # of the embedding table
        indices = dict.fromkeys(list(_token_indices(model, indices) or {})[:1], indices)
    token_ids: list[int] = next(iter(indices.values()), [])
    own = _token_indices(model, token_ids)
    if indices != (own or {}):
        raise ConfigError(
            f"{source}: trainable_token_indices={indices!r} is not supported. Only {own!r} is."
        )
    variant: Literal["lora", "rslora", "dora"] = "rslora" if peft.get("use_rslora") else "lora"
    patterns: dict[str, int] = peft.get("rank_pattern") or {}
    full = {target: name for name, target in _linear(model).items()}
    full = {name: full.get(name, f"model.layers.0.{_in_peft(name, model)}") for name in targets}
    fits = lambda pattern, name: re.fullmatch(rf"(.*\.)?({pattern})", full[name])
    try:
        ranks = {n: next((r for key, r in patterns.items() if fits(key, n)), None) for n in targets}
    except re.error as error:
        raise ConfigError(f"{source}: rank_pattern={patterns!r} is no pattern: {error}.") from error
    lora = LoraConfig(
        rank=peft.get("r", 8),
        alpha=float(peft.get("lora_alpha", 8)),
        targets=targets,
        token_ids=token_ids,
        variant="dora" if peft.get("use_dora") else variant,
        ranks=[f"{name}={rank}" for name, rank in ranks.items() if rank],
    )
    if problems := problems_of(lora, "lora"):
        raise ConfigError([f"{source}: {problem}" for problem in problems])
    return lora


def _is_valid(key: str, value: Any) -> bool:
    """Return whether a value and its elements have types of `_TYPES`; numbers cannot be null."""
    if isinstance(value, list):
        element = int if key == "trainable_token_indices" else str
        if not all(isinstance(item, element) for item in value):
            return False
    if value is None:
        return key not in ("r", "lora_alpha")
    return isinstance(value, _TYPES[key]) and not isinstance(value, bool)


def _token_indices(model: DecoderConfig, token_ids: list[int]) -> dict[str, list[int]] | None:
    tables = token_tables(model, LoraConfig(rank=1, token_ids=token_ids))
    return {name.rpartition(".")[2]: token_ids for name in tables.values()} or None


def _targets(peft: Any, model: DecoderConfig, source: str) -> list[str]:
    """Return our targets of PEFT's list of module names, regular expression, or "all-linear"."""
    every = _linear(model)
    if peft == "all-linear":
        return list(every.values())
    if isinstance(peft, str):
        try:
            return [name for module, name in every.items() if re.fullmatch(peft, module)]
        except re.error as error:
            raise ConfigError(
                f"{source}: target_modules={peft!r} is no pattern: {error}."
            ) from error
    matched = lambda target: [
        n for m, n in every.items() if m == target or m.endswith("." + target)
    ]
    unknown = [target for target in peft or () if not matched(target)]
    if unknown:
        raise ConfigError(
            f"{source}: target_modules has {', '.join(unknown)}, which cannot have an adapter here."
        )
    return list(dict.fromkeys(name for target in peft or () for name in matched(target)))


def _linear(model: DecoderConfig) -> dict[str, str]:
    """Return name in PEFT -> our target of each linear module of the first layer that has it."""
    every, first = _every(model), dict[str, str]()
    parameters = parameter_targets(every, model)
    for module in modules(model, every):
        if module.target not in parameters:
            first.setdefault(module.target, module.name)
    return {name: target for target, name in first.items()}


def _every(model: DecoderConfig) -> LoraConfig:
    """Return settings with all targets of a model."""
    names = (name for product in products_of(model).values() for name in product.names)
    return LoraConfig(rank=1, targets=list(dict.fromkeys(names)))
