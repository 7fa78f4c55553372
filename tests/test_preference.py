"""Preference tuning against TRL in PyTorch, one device, and values of TRL's own code."""

import dataclasses
import functools
import itertools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import MESHES, adapter_run, losses_of, peft_model, train_in_torch, train_on
from commands import records, run_here
from decoders import FAMILIES
from hf_models import write_model
from refusals import refused

from jaxdist.config import RunConfig
from jaxdist.core.types import Context, TokenHead, TokenLogps
from jaxdist.data import DataConfig, open_datasets
from jaxdist.models.adapters import LoraConfig
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.objectives.preference import BASELINE, REFERENCE, Preference
from jaxdist.run import reference as reference_cache
from jaxdist.settings import problems_of

ROWS, SEQ, VOCAB = 16, 24, 96

CHOSEN = [[-0.5, -1.0, -0.25], [-2.0, -0.5, -1.5], [-0.7, -0.9]]
REJECTED = [[-1.5, -0.5], [-0.3, -0.2, -0.4, -0.6], [-2.2]]
REFERENCE_CHOSEN = [[-0.6, -1.2, -0.3], [-1.8, -0.4, -1.6], [-0.9, -0.9]]
REFERENCE_REJECTED = [[-1.2, -0.4], [-0.5, -0.3, -0.4, -0.7], [-2.0]]


def rows_of(tokens):
    """Return values [rows, 4] and their weights, padded with a value that must not count."""
    values = np.full((len(tokens), 4), -50.0, np.float32)
    weights = np.zeros_like(values)
    for row, own in enumerate(tokens):
        values[row, : len(own)], weights[row, : len(own)] = own, 1
    return values, weights


def alternating(first, second):
    return [tokens for pair in zip(first, second, strict=True) for tokens in pair]


def loss_of(kind, policy, reference, beta=0.1, **fields):
    logps, weights = rows_of(policy)
    batch = {
        "targets": jnp.zeros(logps.shape, jnp.int32),
        "weights": jnp.asarray(weights),
        REFERENCE: jnp.asarray([sum(x) for x in reference], jnp.float32),
        **fields,
    }
    context = Context(token_logps=lambda *_: TokenLogps(jnp.asarray(logps), jnp.zeros_like(logps)))
    sums = Preference(kind, beta)(TokenHead(jnp.zeros(()), jnp.zeros(()), 1), batch, context)
    return {name: float(value / sums["weight"]) for name, value in sums.items()}


# Computed with TRL 1.16's own code from these values. TRL has no term of ORPO without the prompt:
# the likelihood term is added by hand, (1.75 / 3 + 4 / 3 + 1.6 / 2) / 3.
@pytest.mark.parametrize(
    "kind, beta, expected",
    [
        ("dpo", 0.1, 0.6844314932823181),
        ("ipo", 0.1, 23.572683334350586),
        ("simpo", 2.0, 1.0459927320480347),
        ("orpo", 0.1, 0.0828969832 + (1.75 / 3 + 4 / 3 + 1.6 / 2) / 3),
    ],
)
def test_losses_of_pairs_equal_trl(kind, beta, expected):
    policy = alternating(CHOSEN, REJECTED)
    means = loss_of(kind, policy, alternating(REFERENCE_CHOSEN, REFERENCE_REJECTED), beta)
    np.testing.assert_allclose(means["loss"], expected, rtol=1e-6)
    if kind == "dpo":
        np.testing.assert_allclose(means["reward_margin"], 0.018333333, rtol=1e-5)
        np.testing.assert_allclose(means["correct"], 2 / 3, rtol=1e-6)
        np.testing.assert_allclose(means["logps_chosen"], -2.45, rtol=1e-6)


@pytest.mark.parametrize("baseline, expected", [(0.35, 0.49770984), (0.0, 0.49770847)])
def test_losses_of_labeled_rows_equal_trl(baseline, expected):
    fields = {
        "labels": jnp.asarray([1, 1, 1, 0, 0, 0]),
        BASELINE: jnp.full(6, baseline, jnp.float32),
    }
    means = loss_of("kto", CHOSEN + REJECTED, REFERENCE_CHOSEN + REFERENCE_REJECTED, **fields)
    np.testing.assert_allclose(means["loss"], expected, rtol=1e-6)
    assert means["kl"] == np.float32(baseline)


BASE = dataclasses.replace(FAMILIES["qwen3"], num_layers=4, vocab_size=VOCAB, max_seq_len=SEQ)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "qwen3"
    write_model(path, BASE, scale=0.1)
    return path


LABEL_WEIGHTS = dict(desirable_weight=1.5, undesirable_weight=0.75)


def config_of(path, kind="dpo", mesh="dp=1", microbatches=0, virtual=1) -> RunConfig:
    records = "labeled" if kind == "kto" else "preference"
    return adapter_run(
        path, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches, virtual=virtual,
        objective=ObjectiveConfig(kind=kind, beta=0.5, **LABEL_WEIGHTS if kind == "kto" else {}),
        data=DataConfig(tokenizer="bytes", records=records),
    )  # fmt: skip


def row_of(prompt, answer):
    row, learned = np.zeros(SEQ + 1, np.int32), np.zeros(SEQ + 1, np.float32)
    row[: len(prompt) + len(answer)] = [*prompt, *answer]
    learned[len(prompt) : len(prompt) + len(answer)] = 1
    return {"tokens": row[:-1], "targets": row[1:], "weights": learned[1:]}


def stacked(rows, prefix=""):
    return {f"{prefix}{name}": np.stack([row[name] for row in rows]) for name in rows[0]}


def batches(kind):
    """Yield batches: prompts of 3 to 8 tokens, shared by pairs, and completions of 2 to 12."""
    random = np.random.default_rng(5)
    draw = lambda low, high: random.integers(2, VOCAB, random.integers(low, high)).tolist()
    while True:
        prompts = [draw(3, 9) for _ in range(ROWS if kind == "kto" else ROWS // 2)]
        prompts = prompts if kind == "kto" else [p for p in prompts for _ in range(2)]
        answers = [draw(2, 13) for _ in range(ROWS)]
        rows = stacked([row_of(*pair) for pair in zip(prompts, answers, strict=True)])
        if kind == "kto":
            others = zip(prompts, [answers[-1], *answers[:-1]], strict=True)
            rows |= stacked([row_of(*pair) for pair in others], "kl_")
            rows["labels"] = random.integers(0, 2, ROWS).astype(np.int32)
        yield rows


def train(config):
    return train_on(config, batches(config.objective.kind))


@pytest.fixture(scope="module")
def alone(base):
    return functools.cache(lambda kind: train(config_of(base, kind))[0])


@pytest.mark.parametrize(
    "mesh, kind",
    [
        ("fsdp=2,tp=2", "kto"),
        pytest.param("pp=2,cp=2", "dpo", marks=pytest.mark.product),
        *(
            pytest.param(mesh, kind, marks=pytest.mark.product)
            for mesh, kind in itertools.product([*MESHES][2:], ["dpo", "kto"])
        ),
    ],
)
def test_a_mesh_learns_the_same_as_one_device(base, alone, mesh, kind):
    history = train(config_of(base, kind, mesh, **MESHES[mesh]))[0]
    expected = alone(kind)
    assert losses_of(expected)[0] - losses_of(expected)[-1] != 0
    for name in ("loss", "kl" if kind == "kto" else "reward_margin", "grad_norm"):
        ours, reference = ([metrics[name] for metrics in part] for part in (history, expected))
        # Margins are differences of sums of log-probabilities near -60.
        atol = 2e-5 if name != "loss" else 0
        np.testing.assert_allclose(ours, reference, rtol=2e-5, atol=atol, err_msg=name)


# TRL 1.16 and accelerate warn of what torch and transformers deprecate.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("kind", ["dpo", "kto", pytest.param("ipo", marks=pytest.mark.product)])
def test_twenty_steps_equal_trl_in_pytorch(base, tmp_path, kind):
    pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    trl = pytest.importorskip("trl", reason="needs the reference extra (trl)")
    datasets = pytest.importorskip("datasets", reason="needs the reference extra (trl)")
    config = config_of(base, kind)
    history, _, before, _ = train(config)
    wrapped = peft_model(config, base, before)
    trainer = trl_trainer(trl, transformers, datasets, wrapped, tmp_path, kind)
    collate = lambda batch: trainer.data_collator(examples_of(batch, kind))
    loss_of = lambda batch: trainer.compute_loss(wrapped, collate(batch))
    expected = train_in_torch(config, wrapped, loss_of, batches(kind))
    np.testing.assert_allclose(losses_of(history), expected, rtol=2e-5)


def trl_trainer(trl, transformers, datasets, model, folder, kind):
    """Return a trainer of TRL for its losses; its own data and loop are not used."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[PAD]": 0, "[EOS]": 1, **{str(i): i for i in range(2, VOCAB)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[PAD]")),
        pad_token="[PAD]",
        eos_token="[EOS]",
    )
    common = dict(
        output_dir=str(folder), beta=0.5, max_length=None, use_cpu=True, bf16=False, report_to=[],
        per_device_train_batch_size=ROWS, gradient_checkpointing=False,
    )  # fmt: skip
    record = {"prompt": "2 3", "completion": "4", "label": True}
    if kind == "kto":
        config, kind = trl.KTOConfig(**common, **LABEL_WEIGHTS), trl.KTOTrainer
    else:
        record = {"prompt": "2 3", "chosen": "4", "rejected": "5"}
        losses = {"dpo": "sigmoid", "ipo": "ipo"}
        config, kind = trl.DPOConfig(loss_type=[losses[kind]], **common), trl.DPOTrainer
    data = datasets.Dataset.from_list([record] * ROWS)
    trainer = kind(model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.model.eval()  # there is no dropout; eval mode only changes what TRL logs
    return trainer


def examples_of(batch, kind):
    """Return the examples of a batch as TRL's collator takes them: prompt and completion ids."""

    def split(row, prefix=""):
        tokens, targets = batch[f"{prefix}tokens"][row], batch[f"{prefix}targets"][row]
        learned = np.flatnonzero(batch[f"{prefix}weights"][row])
        first, last = learned[0], learned[-1] + 1
        return [int(tokens[0]), *targets[:first].tolist()], targets[first:last].tolist()

    rows = [split(row) for row in range(ROWS)]
    if kind != "kto":
        pairs = zip(rows[::2], rows[1::2], strict=True)
        return [{"prompt_ids": a[0], "chosen_ids": a[1], "rejected_ids": b[1]} for a, b in pairs]
    return [
        {"prompt_ids": prompt, "completion_ids": answer, "label": bool(batch["labels"][row])}
        | {"KL_completion_ids": split(row, "kl_")[1]}
        for row, (prompt, answer) in enumerate(rows)
    ]


PLAIN = "<|user|>\nhi\n<|assistant|>\n"


def opened(tmp_path, lines, seq_len=40, **settings):
    kind = "labeled" if "label" in lines[0] else "preference"
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    config = DataConfig(
        sources=[str(path)], tokenizer="bytes", records=kind, eval_fraction=0.0, **settings
    )
    return open_datasets(config, seq_len=seq_len)[0]


def learned(row, prefix=""):
    used = row[f"{prefix}weights"] > 0
    text = bytes(np.append(row[f"{prefix}tokens"][:1], row[f"{prefix}targets"]).astype(np.uint8))
    return text.rstrip(b"\0").decode(), bytes(row[f"{prefix}targets"][used].astype(np.uint8))


MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "record, prompt, chosen, rejected",
    [
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " red."}, "The sky is", " blue.",
         " red."),
        ({"chosen": "The sky is blue.", "rejected": "The sky is red."}, "The sky is", " blue.",
         " red."),
        ({"prompt": [MESSAGE], "chosen": [{"role": "assistant", "content": "yes"}],
          "rejected": [{"role": "assistant", "content": "no"}]}, PLAIN, "yes", "no"),
        ({"chosen": [MESSAGE, {"role": "assistant", "content": "yes"}], "prompt": "hi",
          "rejected": [MESSAGE, {"role": "assistant", "content": "no"}], "score_chosen": 8.5},
         PLAIN, "yes", "no"),
    ],
)  # fmt: skip
def test_only_completions_are_learned(tmp_path, record, prompt, chosen, rejected):
    data = opened(tmp_path, [record, record])
    assert data.num_rows == 4
    for row, answer in ((data[0], chosen), (data[1], rejected)):
        text, loss = learned(row)
        assert (text, loss) == (prompt + answer, answer.encode() + b"\0")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "b", "rejected": ["c"]},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a", "chosen": "b", "rejected": "c", "image": "x.png"},
        {"prompt": "b", "chosen": [MESSAGE], "rejected": [MESSAGE]},
        {"prompt": "a", "completion": "b", "label": 1},
        {"completion": "b", "label": True},
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path, record):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    good = {"prompt": "a", "completion": "b", "label": True} if "label" in record else good
    with refused("records.jsonl:2"):
        opened(tmp_path, [good, record])


def test_labels_and_mismatched_completions(tmp_path):
    records = [{"prompt": f"p{i}", "completion": f" c{i}", "label": i != 1} for i in range(3)]
    data = opened(tmp_path, records)
    assert [int(data[i]["labels"]) for i in range(3)] == [1, 0, 1]
    assert [learned(data[i])[0] for i in range(3)] == ["p0 c0", "p1 c1", "p2 c2"]
    assert [learned(data[i], "kl_") for i in range(3)] == [
        (f"p{i} c{j}", f" c{j}\0".encode()) for i, j in ((0, 2), (1, 0), (2, 1))
    ]


def test_records_longer_than_a_row(tmp_path):
    records = [
        {"prompt": "p", "chosen": " yes", "rejected": " no"},
        {"prompt": "p", "chosen": " a long text", "rejected": " no"},  # its end is cut
        {"prompt": "a long prompt", "chosen": " yes", "rejected": " no"},  # has no room
    ]
    cut = opened(tmp_path, records, seq_len=8)
    assert [learned(cut[i])[1] for i in range(4)] == [b" yes\0", b" no\0", b" a long ", b" no\0"]
    assert cut.num_rows == 4
    assert opened(tmp_path, records, seq_len=8, long_records="drop").num_rows == 2
    with refused("all 3 records", "train.seq_len=2"):
        opened(tmp_path, records, seq_len=2, long_records="drop")
    with refused("2 of 3 records", "data.long_records"):
        opened(tmp_path, records, seq_len=8, long_records="reject")


def test_tokens_of_other_records_are_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    assert run_here("data.__main__", tmp_path / "a.txt", "--out", tmp_path / "text") == 0
    opened(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    flags = "--out", tmp_path / "pairs", "--records", "preference"
    assert run_here("data.__main__", tmp_path / "records.jsonl", *flags) == 0
    for folder, kind, wrong in (("text", "preference", "text"), ("pairs", "chat", "preference")):
        config = DataConfig(sources=[str(tmp_path / folder)], tokenizer="bytes", records=kind)
        with refused(folder, f"data.records={wrong}"):
            open_datasets(config, seq_len=8)


def test_settings_that_do_not_fit_preferences(base):
    config = config_of(base)
    bad = dataclasses.replace(
        config,
        lora=LoraConfig(),
        data=dataclasses.replace(config.data, records="chat"),
        objective=ObjectiveConfig(kind="dpo", reference="adapter_off"),
    )
    problems = problems_of(bad)
    assert sum(p.startswith(("objective.kind=dpo", "objective.reference=")) for p in problems) == 2
    plain = dataclasses.replace(config, objective=ObjectiveConfig())
    assert any("data.records=preference" in problem for problem in problems_of(plain))
    weighted = dataclasses.replace(config, objective=ObjectiveConfig(kind="dpo", **LABEL_WEIGHTS))
    assert any("objective.undesirable_weight=0.75" in p for p in problems_of(weighted))
    packed = dataclasses.replace(config.data, packing="best_fit")
    assert any("data.packing" in p for p in problems_of(packed, "data"))


def test_pairs_that_a_mesh_would_split_are_rejected(base):
    config = config_of(base, mesh="dp=16")
    problems = config.mesh_problems(config.mesh.spec)
    assert any("rows_per_example=2" in problem for problem in problems)


def write_records(path, labeled=False):
    random = np.random.default_rng(0)
    words = ["red", "blue", "green", "cat", "dog", "sun"]
    with path.open("w") as file:
        for number in range(200):
            prompt = "Say " + " ".join(random.choice(words, 3))
            good, bad = f" {random.choice(words)} yes", f" {words[0]} no"
            record = {"chosen": good, "rejected": bad}
            if labeled:
                record = {"completion": [good, bad][number % 2], "label": number % 2 == 0}
            file.write(json.dumps({"prompt": prompt, **record}) + "\n")
    return path


def run_of(tmp_path, name, kind, *flags, leave=()):
    labeled = kind == "kto"
    path = write_records(tmp_path / f"{kind}.jsonl", labeled)
    settings = (
        "--model.d-model 32 --model.num-layers 2 --model.num-heads 4 --train.seq-len 48 "
        "--train.steps 20 --train.global-batch-size 16 --optim.peak-lr 1e-2 "
        f"--eval.interval-steps 10 --objective.kind {kind} --data.eval-fraction 0.1 "
        f"--data.records {'labeled' if labeled else 'preference'} --data.sources {path} "
        f"--data.tokenizer bytes --run-dir {tmp_path / name}"
    )
    chosen = {flag.partition(" ")[0] for flag in flags} | {*leave}
    kept = [f"--{x}" for x in settings.split("--")[1:] if f"--{x.split()[0]}" not in chosen]
    assert run_here("train", *" ".join([*kept, *flags]).split()) == 0
    return [records(tmp_path / name, part) for part in ("train", "eval")]


def evaluated(capsys, run):
    capsys.readouterr()
    assert run_here("evaluate", run, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_dpo_increases_the_margin_of_held_out_pairs(tmp_path, capsys):
    trained, evals = run_of(tmp_path, "run", "dpo", "--lora.rank 4")
    assert [record["examples"] for record in evals] == [20, 20]  # 10 % of 200 pairs
    assert 0.05 < evals[0]["reward_margin"] < evals[1]["reward_margin"]
    assert evals[1]["loss"] < np.log(2) and "perplexity" not in evals[1]
    assert trained[0]["reward_margin"] == 0 and trained[0]["weight"] == 8
    assert evaluated(capsys, tmp_path / "run")["loss"] == pytest.approx(evals[1]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, mesh", [pytest.param("ipo", "fsdp=8", marks=pytest.mark.product), ("kto", "dp=4,tp=2")]
)
def test_precomputed_values_are_those_of_each_step(tmp_path, monkeypatch, kind, mesh):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    flags = "--lora.rank 4", f"--mesh {mesh}", "--train.steps 6", "--eval.interval-steps 3"
    expected = run_of(tmp_path, "each", kind, *flags)
    precomputed = run_of(tmp_path, "once", kind, *flags, "--objective.reference precomputed")
    for ours, reference in zip(precomputed, expected, strict=True):
        for one, other in zip(ours, reference, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert expected[0][0]["loss"] != expected[0][-1]["loss"]


@pytest.mark.slow
def test_all_weights_learn_from_values_of_their_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    other = tmp_path / "other"
    write_model(other, dataclasses.replace(BASE, vocab_size=256, max_seq_len=64), scale=0.2)
    start = tmp_path / "start"
    write_model(start, dataclasses.replace(BASE, vocab_size=256, max_seq_len=64), scale=0.1)
    sizes = [f"--{name}" for name in ("model.d-model", "model.num-layers", "model.num-heads")]
    flags = f"--init-from {start}", "--optim.peak-lr 1e-3", "--train.seq-len 40"
    trained, evals = run_of(tmp_path, "run", "dpo", *flags, leave=sizes)
    assert trained[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)  # the model is the reference
    assert trained[-1]["reward_margin"] > 0.1
    margin = evaluated(capsys, tmp_path / "run")["reward_margin"]
    assert margin == pytest.approx(evals[-1]["reward_margin"], rel=1e-4)
    with refused("started from other weights"):
        run_of(
            tmp_path, "run", "dpo", *flags[1:], f"--init-from {other}", "--train.steps 30",
            leave=sizes,
        )  # fmt: skip


def test_jobs_that_share_a_cache_may_compute_the_same_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path))
    monkeypatch.setattr(reference_cache, "_computed", lambda *_: np.ones((1, 3), np.float32))
    rows = dataclasses.make_dataclass("Rows", ["parts", "fields", "fingerprint"])([], {}, "rows")
    plan = types.SimpleNamespace(compute_dtype="float32", matmul_dtype="")
    config = types.SimpleNamespace(model=BASE)
    parts = types.SimpleNamespace(plan=plan, config=config)
    one_job = lambda: reference_cache._with_columns(parts, {}, "", rows)
    jobs = iter([one_job, lambda: None])
    save = np.save  # the other job writes the file at the same time
    monkeypatch.setattr(np, "save", lambda *args: (save(*args), next(jobs)()))
    one_job()
    (file,) = tmp_path.glob("*/*")
    assert np.load(file).shape == (1, 3)
    monkeypatch.setattr(np, "save", save)
    config.model = dataclasses.replace(BASE, rope_theta=2.0)  # of the same weights
    one_job()
    assert len(list(tmp_path.glob("*/*"))) == 2
