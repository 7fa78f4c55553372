"""Reward models and classifiers of texts against transformers, TRL, PEFT and one device."""

import collections
import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from adapter_runs import (
    adapter_run,
    losses_of,
    peft_model,
    peft_tensors,
    train_in_torch,
    train_on,
)
from commands import records, run_here
from decoders import FAMILIES, VARIANTS
from hf_models import write_model
from refusals import refused
from test_preference import evaluated, write_records

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.experts import make_experts
from jaxdist.core.forward import ForwardPass
from jaxdist.core.matmul.grouped import make_grouped_dot
from jaxdist.core.types import Context
from jaxdist.data import DataConfig, open_datasets
from jaxdist.models import build
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.directory import read_model
from jaxdist.models.huggingface.families import write_config
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.plan.estimate.model_trace import decoder_of
from jaxdist.run.setup import assemble
from jaxdist.settings import problems_of

ROWS, SEQ, VOCAB = 16, 24, 96
SIZES = dict(num_layers=2, vocab_size=VOCAB, max_seq_len=SEQ)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    write_model(folder / "dense", dataclasses.replace(FAMILIES["qwen3"], **SIZES), scale=0.1)
    sparse = dataclasses.replace(VARIANTS["qwen3_moe"], **SIZES | {"num_layers": 1})
    write_model(folder / "sparse", sparse, scale=0.1)
    return folder


def config_of(bases, labels=1, mesh="dp=1", base="dense", lora=0, microbatches=0):
    config = adapter_run(
        bases / base, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches,
        lora={"rank": lora},
        objective=ObjectiveConfig(kind="reward" if labels == 1 else "cross_entropy"),
        data=DataConfig(tokenizer="bytes", records="preference" if labels == 1 else "text_label"),
    )  # fmt: skip
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_labels=labels))


def batches(labels):
    random = np.random.default_rng(5)
    while True:
        lengths = random.integers(3, SEQ + 1, ROWS)
        is_real = np.arange(SEQ) < lengths[:, None]
        tokens = np.where(is_real, random.integers(2, VOCAB, (ROWS, SEQ)), 0).astype(np.int32)
        weights = (np.arange(SEQ) == lengths[:, None] - 1).astype(np.float32)
        batch = {"tokens": tokens, "targets": np.zeros_like(tokens), "weights": weights}
        if labels > 1:
            batch["labels"] = (tokens[:, 0] % labels).astype(np.int32)
        yield batch


def train(config):
    return train_on(config, batches(config.model.num_labels))


MESHES = {
    "fsdp=2,tp=2": {},
    "pp=2,tp=2": {"microbatches": 4},
}
MORE_MESHES = {
    "dp=2,cp=2": {"microbatches": 2},
    "cp=2,tp=2": {},
    "ep=2,fsdp=2": {"labels": 3, "base": "sparse"},
    "dp=4": {"labels": 3, "microbatches": 2},
    "dp=8": {},
    "fsdp=4": {"lora": 4},
    "tp=2": {"labels": 3},
    "dp=2,fsdp=2,tp=2": {"lora": 4},
    "fsdp=2,cp=2": {},
    "pp=2": {"labels": 3, "microbatches": 4},
    "fsdp=2,pp=2": {"lora": 4, "microbatches": 2},
    "pp=2,cp=2": {"labels": 3, "microbatches": 2},
    "cp=4": {},
}


@pytest.fixture(scope="module")
def alone(bases):
    return functools.cache(lambda **changes: train(config_of(bases, **changes))[0])


@pytest.mark.parametrize(
    "mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.product) for mesh in MORE_MESHES)]
)
def test_a_mesh_learns_the_same_as_one_device(bases, alone, mesh):
    changes = (MESHES | MORE_MESHES)[mesh]
    history = train(config_of(bases, mesh=mesh, **changes))[0]
    expected = alone(**{k: v for k, v in changes.items() if k != "microbatches"})
    assert expected[-1]["loss"] != expected[0]["loss"]
    assert expected[0]["weight"] == ROWS // (1 + (changes.get("labels", 1) == 1))
    for name in ("loss", "grad_norm", "accuracy"):
        values = ([metrics[name] for metrics in part] for part in (history, expected))
        np.testing.assert_allclose(*values, rtol=2e-5, atol=0, err_msg=name)


def torch_loss(config, model):
    """Return batch -> loss of a classifier of transformers, or of pairs in TRL's RewardTrainer."""
    import torch
    from trl import RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    # What TRL's loss reads of its trainer.
    trainer = SimpleNamespace(
        model=model.eval(), args=SimpleNamespace(center_rewards_coefficient=None),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
    )  # fmt: skip
    collate = DataCollatorForPreference(pad_token_id=0)

    def loss_of(batch):
        texts = [row[row > 0].tolist() for row in batch["tokens"]]
        if config.model.num_labels == 1:
            pairs = zip(texts[::2], texts[1::2], strict=True)
            inputs = collate([{"chosen_ids": a, "rejected_ids": b} for a, b in pairs])
            return RewardTrainer.compute_loss(trainer, model, inputs)
        tokens = torch.from_numpy(batch["tokens"]).long()
        labels = torch.from_numpy(batch["labels"]).long()
        return model(tokens, attention_mask=tokens > 0, labels=labels).loss

    return loss_of


# TRL and transformers warn of what torch deprecates.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("labels, lora", [(1, 0), (1, 4), (3, 0)])
def test_twenty_steps_equal_those_in_pytorch(bases, labels, lora):
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    pytest.importorskip("trl", reason="needs the reference extra (trl)")
    config = config_of(bases, labels, lora=lora)
    history, _, before, after = train(config)
    if lora:
        model = peft_model(config, bases / "dense", before)
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            bases / "dense", num_labels=labels, pad_token_id=0, attn_implementation="eager",
            dtype=torch.float32,
        )  # fmt: skip
        with torch.no_grad():
            model.score.weight.copy_(torch.from_numpy(before["head"]["score"].T.copy()))
    expected = train_in_torch(config, model, torch_loss(config, model), batches(labels))
    np.testing.assert_allclose(losses_of(history), expected, rtol=2e-5)
    if lora:
        import peft

        ours, expected = peft_tensors(config, after), peft.get_peft_model_state_dict(model)
        assert ours.keys() == expected.keys()
        name = "base_model.model.score.weight"
        np.testing.assert_allclose(ours[name], expected[name].numpy(), atol=1e-3)


def scores_of(model, params, batch):
    model = dataclasses.replace(model, objective=lambda output, *_: {"scores": output})
    context = Context(
        attend=make_attend(AttentionPlan("cpu")), experts=make_experts(make_grouped_dot("cpu"))
    )
    return jax.jit(lambda *args: ForwardPass(model).loss(*args, context)["scores"])(params, batch)


CLASSES = [*FAMILIES, "olmo2", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe"]


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("family, labels", [*zip(CLASSES, [3, 1] * 6, strict=True)])
def test_scores_and_tensors_of_transformers_classes(tmp_path, family, labels):
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    config = dataclasses.replace((FAMILIES | VARIANTS)[family], num_labels=labels)
    write_model(tmp_path / "hf", config, scale=0.1)
    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", pad_token_id=0, attn_implementation="eager", dtype=torch.float32,
        output_loading_info=True,
    )  # fmt: skip
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys"))
    batch = next(batches(1))
    tokens = torch.from_numpy(batch["tokens"]).long()
    with torch.no_grad():
        expected = model.eval()(tokens, attention_mask=tokens > 0).logits.numpy()
    run = adapter_run(tmp_path / "hf", rows=ROWS, seq_len=SEQ, lora={"rank": 0})
    assert run.model.num_labels == labels
    params = assemble(run, jax.devices()[:1]).initial_params()
    ours = scores_of(build(run.model, seq_len=SEQ), params, batch)
    np.testing.assert_allclose(ours, expected, atol=2e-5)
    assert np.ptp(expected) > 0.1
    # The class saves the model; import and export keep every bit, and every name.
    model.save_pretrained(tmp_path / "saved")
    assert run_here("tools.convert.__main__", "from-hf", tmp_path / "saved", tmp_path / "run") == 0
    assert run_here("tools.convert.__main__", "to-hf", tmp_path / "run", tmp_path / "back") == 0
    before, after = (safetensors.open_all(tmp_path / name) for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].read(), after[name].read()) for name in before)
    assert read_model(tmp_path / "back") == read_model(tmp_path / "hf")


@pytest.mark.parametrize("family", ["dots1", "olmoe"])
def test_a_family_without_a_class_is_rejected_in_an_export(family):
    with refused(family):
        write_config(dataclasses.replace(VARIANTS[family], num_labels=3), "float32")


def opened(tmp_path, lines, num_labels, seq_len=12, **settings):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    kind = "preference" if num_labels == 1 else "text_label"
    config = DataConfig(
        sources=[str(path)], tokenizer="bytes", records=kind, eval_fraction=0.0, **settings
    )
    return open_datasets(config, seq_len=seq_len, num_labels=num_labels)[0]


def test_the_score_is_read_at_the_last_token(tmp_path):
    pairs = opened(tmp_path, [{"prompt": "a", "chosen": " b", "rejected": " long text"}], 1)
    texts = [bytes(pairs[i]["tokens"].astype(np.uint8)) for i in range(2)]
    assert texts == [b"a b\0" + bytes(8), b"a long text\0"]  # byte 0 ends a completion
    assert [np.flatnonzero(pairs[i]["weights"]).tolist() for i in range(2)] == [[3], [11]]
    long = {"prompt": "a long prompt", "chosen": "b", "rejected": "c"}  # both rows would be equal
    assert opened(tmp_path, [long, {**long, "prompt": "short"}], 1).num_rows == 2
    lines = [{"text": "abc", "label": 2}, {"text": "a text that is cut", "label": 0}]
    classes = opened(tmp_path, lines, 3)
    assert [int(classes[i]["labels"]) for i in range(2)] == [2, 0]
    assert bytes(classes[1]["tokens"].astype(np.uint8)) == b"a text that "
    assert [np.flatnonzero(classes[i]["weights"]).tolist() for i in range(2)] == [[2], [11]]
    assert opened(tmp_path, lines, 3, long_records="drop").num_rows == 1
    with refused("1 of 2 records", "data.long_records"):
        opened(tmp_path, lines, 3, long_records="reject")
    with refused("label 2", "model.num_labels=3"):
        opened(tmp_path, lines, 2)
    for bad in ({"text": "a"}, {"text": "a", "label": True}, {"text": "", "label": 0},
                {"text": "a", "label": 256}, {"text": "a", "label": 0, "weight": 2}):  # fmt: skip
        with refused("records.jsonl:2"):
            opened(tmp_path, [lines[0], bad], 3)


def test_settings_that_do_not_fit_scores(bases):
    config = config_of(bases)
    relevant = lambda config: [p for p in problems_of(config) if "num_labels" in p]
    assert relevant(config) == [] == relevant(config_of(bases, 3))
    changed = lambda section, **values: dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )
    for wrong, name in (
        (changed("model", num_labels=0), "model.num_labels to 1"),
        (changed("model", num_labels=3), "model.num_labels to 1"),
        (changed("data", records="text_label"), "data.records=preference"),
        (changed("objective", kind="dpo"), "model.num_labels to 0"),
        (changed("objective", kind="cross_entropy"), "model.num_labels to 0"),
    ):
        assert any(name in problem for problem in problems_of(wrong)), name
    assert any("rows_per_example=2" in p for p in config.mesh_problems(
        dataclasses.replace(config.mesh, shape="dp=16").spec))  # fmt: skip


def test_the_estimate_recognizes_a_decoder_with_scores(bases):
    config = config_of(bases, 3)
    shape = decoder_of(build(config.model, seq_len=SEQ), SEQ)
    plain = dataclasses.replace(config.model, num_labels=0)
    expected = decoder_of(build(plain, seq_len=SEQ), SEQ)
    assert shape == dataclasses.replace(expected, columns=3)


def trained(tmp_path, name, *flags):
    settings = (
        "--train.seq-len 48 --train.steps 20 --train.global-batch-size 16 --optim.peak-lr 1e-2 "
        "--optim.warmup-steps 2 --eval.interval-steps 10 --data.eval-fraction 0.1 "
        f"--data.tokenizer bytes --run-dir {tmp_path / name}"
    )
    assert run_here("train", *settings.split(), *" ".join(flags).split()) == 0
    return [records(tmp_path / name, part) for part in ("train", "eval")]


SMALL = "--model.d-model 32 --model.num-layers 2 --model.num-heads 4"


def test_a_reward_model_learns_from_a_trained_run(tmp_path, capsys):
    pairs = write_records(tmp_path / "pairs.jsonl")
    base = dataclasses.replace(FAMILIES["qwen3"], vocab_size=256, max_seq_len=64)
    write_model(tmp_path / "base", base, scale=0.1)
    flags = f"--data.sources {pairs} --data.records preference --objective.kind reward"
    flags += f" --model.num-labels 1 --init-from {tmp_path / 'base'}"
    _, evals = trained(tmp_path, "all", flags, "--mesh fsdp=4,tp=2")
    assert evals[1]["accuracy"] == 1 and evals[0]["reward_margin"] < evals[1]["reward_margin"]
    result = evaluated(capsys, tmp_path / "all")
    assert result["accuracy"] == 1 and result["loss"] == pytest.approx(evals[1]["loss"], rel=1e-5)
    with refused("does not generate text"):
        run_here("generate", tmp_path / "all", "--prompt", "a")
    # Adapters: the head is trained and saved next to them.
    _, evals = trained(tmp_path, "lora", flags, "--lora.rank 4 --lora.base-format float32")
    assert evals[1]["accuracy"] == 1
    convert = functools.partial(run_here, "tools.convert.__main__")
    run, peft, merged, hf = (tmp_path / name for name in ("lora", "peft", "merged", "hf"))
    assert convert("to-peft", run, peft) == 0
    assert convert("merge", run, merged) == 0
    assert convert("to-hf", merged, hf) == 0
    assert read_model(hf).num_labels == 1
    assert run_here("verify.__main__", run, "--export", peft) == 0
    assert run_here("verify.__main__", merged, "--export", hf) == 0


def test_a_classifier_reports_its_accuracy(tmp_path, capsys):
    random, words = np.random.default_rng(0), [["red", "ruby"], ["sky", "sea"], ["leaf", "fern"]]
    path = tmp_path / "texts.jsonl"
    with path.open("w") as file:
        for i in range(200):
            text = " ".join(random.choice(words[i % 3], random.integers(2, 6)))
            file.write(json.dumps({"text": text, "label": i % 3}) + "\n")
    flags = f"--data.sources {path} --data.records text_label --model.num-labels 3 {SMALL}"
    _, evals = trained(tmp_path, "run", flags, "--train.label-smoothing 0.1 --mesh dp=8")
    assert evals[1]["accuracy"] == 1 and evals[1]["examples"] == 20
    assert evaluated(capsys, tmp_path / "run")["accuracy"] == 1
