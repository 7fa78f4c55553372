"""ORPO and SimPO against the losses of TRL's experimental trainers, for 20 steps in PyTorch."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from adapter_runs import RATE, STEPS, peft_model
from hf_models import write_model
from test_preference import BASE, batches, config_of, losses_of, train


# TRL and transformers warn of what torch deprecates.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("kind", ["orpo", pytest.param("simpo", marks=pytest.mark.product)])
@pytest.mark.slow
def test_twenty_steps_equal_trl(tmp_path, kind):
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    pytest.importorskip("trl", reason="needs the reference extra (trl)")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    write_model(tmp_path / "base", BASE, scale=0.1)
    config = config_of(tmp_path / "base", kind)
    history, before = train(config)
    model = peft_model(config, tmp_path / "base", before)
    moving = [p for p in model.parameters() if p.requires_grad]
    rule = torch.optim.AdamW(moving, RATE, betas=(config.optim.beta1, config.optim.beta2),
                             eps=config.optim.eps, weight_decay=0.0)  # fmt: skip
    # The settings that TRL's losses read of their trainer.
    trainer = SimpleNamespace(
        beta=0.5, simpo_gamma=0.5, alpha=0.0, label_smoothing=0.0, loss_type="simpo",
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    expected = []
    for batch in itertools.islice(batches(kind), STEPS):
        tokens, labels = (torch.from_numpy(batch[name]).long() for name in ("tokens", "targets"))
        labels[torch.from_numpy(batch["weights"]) == 0] = -100
        # TRL's labels are tokens, and it shifts them.
        labels = torch.cat([torch.full_like(labels[:, :1], -100), labels], 1)
        logits = model(tokens).logits
        logits = torch.cat([logits, torch.zeros_like(logits[:, :1])], 1)
        means = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=True)
        pair = means[::2], means[1::2]
        if kind == "simpo":
            loss = CPOTrainer.cpo_loss(trainer, *pair)[0].mean()
        else:
            loss = (-pair[0] - ORPOTrainer.odds_ratio_loss(trainer, *pair)[0]).mean()
        rule.zero_grad()
        loss.backward()
        rule.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses_of(history), expected, rtol=2e-5)
    assert expected[0] != expected[-1]
