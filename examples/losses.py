"""Losses of today, each with the loss and the gradients of one process on the whole batch.

torchrun --nproc-per-node 2 examples/losses.py
"""

import copy

import torch
from torch import nn
from torch.nn import functional

from penstock import Pipeline, Plan, Stage, capture_model

ROWS, MICRO_BATCHES, WIDTH, WORDS = 8, 4, 16, 20


def close(found, expected):
    return torch.allclose(
        found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-9, atol=1e-12
    )


def compare(name, model, batch, cut, *, metrics=None, loss=None):
    """A step of two stages without an optimizer; every rank compares its gradients.

    A ``loss`` mixes the samples of the batch, so the last stage computes it after all forwards.
    """
    reference = copy.deepcopy(model)
    graph = capture_model(model, batch, loss=loss)
    cut, end = graph.layer_names.index(cut), len(graph.layer_names)
    rows = (ROWS // MICRO_BATCHES,)
    stages = (Stage(range(cut), (0,), rows), Stage(range(cut, end), (1,), rows))
    plan = Plan(stages, MICRO_BATCHES, *rows, "1f1b" if loss is None else "gpipe")
    with Pipeline(graph, batch, plan=plan, metrics=metrics) as pipe:
        pipe.print_with(lambda line: None)
        out = reference(**batch)
        expected = out["loss"] if loss is None else loss(out, batch)
        expected.backward()
        step = pipe.step(batch)
        theirs = {k: p.grad for k, p in reference.named_parameters() if p.grad is not None}
        own = {key: p.grad for key, p in pipe.named_parameters() if key in theirs}
        wrong = [key for key, slope in own.items() if not close(slope, theirs[key])]
        if wrong or not close(torch.tensor(step.loss), expected.detach()):
            raise SystemExit(f"{name}: {wrong} or the loss {step.loss} ({expected}) differ")
        if pipe.rank == 0:
            parts = "".join(f", {key} {value:.4f}" for key, value in step.metrics.items())
            print(f"{name}: loss {step.loss:.4f}{parts}")


def trunk(*, layers=3):
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))


class Language(nn.Module):
    """Scores for the next words."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), trunk()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


def log_probability(scores, words, mask):
    each = scores[:, :-1].log_softmax(-1).gather(2, words[:, 1:, None]).squeeze(2)
    return (each * mask[:, 1:]).sum(1)


class Preference(nn.Module):
    """DPO (Rafailov et al., 2023); the policy's own scores at first are columns of the batch."""

    def __init__(self, beta=0.1):
        super().__init__()
        self.policy, self.beta = Language(), beta

    def forward(self, chosen, rejected, chosen_mask, rejected_mask, chosen_before, rejected_before):
        words, mask = torch.cat([chosen, rejected]), torch.cat([chosen_mask, rejected_mask])
        good, bad = log_probability(self.policy(words), words, mask).chunk(2)
        gains = self.beta * (good - chosen_before), self.beta * (bad - rejected_before)
        reward = gains[0].mean()
        return {"loss": -functional.logsigmoid(gains[0] - gains[1]).mean(), "reward": reward}


class Actor(nn.Module):
    """PPO (Schulman et al., 2017), with advantages normalised over the whole batch."""

    def __init__(self, clip=0.2):
        super().__init__()
        self.blocks, self.clip = trunk(), clip
        self.policy, self.value = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 1)

    def forward(self, state, action, before, advantage, returns):
        for block in self.blocks:
            state = torch.tanh(block(state))
        chosen = self.policy(state).log_softmax(1).gather(1, action[:, None]).squeeze(1)
        ratio = (chosen - before).exp()
        normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy = -torch.minimum(ratio * normal, clipped * normal).mean()
        value = (self.value(state).squeeze(1) - returns).square().mean()
        return {"loss": policy + 0.5 * value, "policy": policy, "value": value}


class Distilled(nn.Module):
    """A frozen teacher, whose layers come first and so are on the first ranks."""

    def __init__(self, heat=2.0):
        super().__init__()
        self.teacher, self.student, self.heat = Language(), Language(), heat
        self.teacher.requires_grad_(False)

    def forward(self, words, target):
        with torch.no_grad():
            soft = (self.teacher(words) / self.heat).log_softmax(-1).flatten(0, 1)
        scores = self.student(words).flatten(0, 1)
        ours = (scores / self.heat).log_softmax(-1)
        near = functional.kl_div(ours, soft, reduction="batchmean", log_target=True)
        words = functional.cross_entropy(scores, target.flatten())
        return {"loss": 0.7 * self.heat**2 * near + 0.3 * words, "near": near, "words": words}


class Routed(nn.Module):
    """A router that gives each sample one of four experts, and returns the loss of its scores."""

    def __init__(self):
        super().__init__()
        self.blocks, self.router = trunk(), nn.Linear(WIDTH, 4)
        self.experts = trunk(layers=4)

    def forward(self, x, target):
        for block in self.blocks:
            x = torch.tanh(block(x))
        scores = self.router(x)
        weights, chosen = scores.softmax(1).max(1)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        x = weights[:, None] * each[torch.arange(len(x)), chosen]
        large = scores.logsumexp(1).square().mean()
        error = functional.mse_loss(x, target)
        return {"loss": error + 0.001 * large, "error": error, "z": large}


class Towers(nn.Module):
    """Two ends of each sample, and a learned factor on their products."""

    def __init__(self):
        super().__init__()
        self.seen, self.read = trunk(), trunk()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture, text):
        for seen in self.seen:
            picture = torch.tanh(seen(picture))
        for read in self.read:
            text = torch.tanh(read(text))
        return {"picture": picture, "text": text, "factor": self.scale.exp()}


def contrast(output, batch):
    """Every other sample of the batch is a negative of a sample (CLIP, Radford et al., 2021)."""
    picture, text = (functional.normalize(output[key], dim=1) for key in ("picture", "text"))
    scores = output["factor"] * picture @ text.T
    target = torch.arange(len(scores))
    one, other = (functional.cross_entropy(each, target) for each in (scores, scores.T))
    return (one + other) / 2


def spread(output, batch):
    """Distance, deviation over the batch, covariance (VICReg, Bardes et al., 2022)."""
    both = output["picture"], output["text"]
    loss = functional.mse_loss(*both)
    for end in both:
        matrix = end.T.cov()
        loss = loss + functional.relu(1 - end.std(0)).mean()
        loss = loss + (matrix - matrix.diag().diag()).square().sum() / len(matrix)
    return loss


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
words, other = torch.randint(WORDS, (2, ROWS, 6))
lengths = torch.randint(3, 7, (2, ROWS, 1))
masks = (torch.arange(6) < lengths).double()
floats = torch.randn(4, ROWS)
wide = torch.randn(2, ROWS, WIDTH)

preference = {
    "chosen": words,
    "rejected": other,
    "chosen_mask": masks[0],
    "rejected_mask": masks[1],
}
preference |= {"chosen_before": floats[0] - 12, "rejected_before": floats[1] - 12}
compare("DPO", Preference(), preference, "policy.blocks.1", metrics={"reward": "reward"})

acted = {"state": wide[0], "action": torch.randint(5, (ROWS,)), "before": floats[0] - 2}
acted |= {"advantage": floats[1], "returns": floats[2]}
compare("PPO", Actor(), acted, "blocks.1", metrics={"policy": "policy", "value": "value"})

taught = {"words": words, "target": other}
compare("distillation", Distilled(), taught, "student.embed", metrics={"words": "words"})

routed = {"x": wide[0], "target": wide[1]}
compare("router", Routed(), routed, "blocks.1", metrics={"error": "error", "z": "z"})

pairs = {"picture": wide[0], "text": wide[1]}
compare("contrast", Towers(), pairs, "read.0", loss=contrast)
compare("spread", Towers(), pairs, "read.0", loss=spread)
