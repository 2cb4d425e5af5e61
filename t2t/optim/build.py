"""Decay groups, default rates, schedules, and the optimizer of the training step.

The optimizer keeps fp32 master weights and fp32 gradients for parameters of lower precision, and names all its state
by parameter, so that a checkpoint holds tensors and nothing else.

>>> model = nn.Linear(4, 2, dtype=torch.bfloat16)
>>> settings = Optim(schedule="constant")
>>> optimizer = Optimizer(dict(model.named_parameters()), settings, lr=0.1, schedule=schedule(settings, 10))
>>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
>>> optimizer.accumulate()
>>> round(optimizer.clip(1.0).item(), 3)  # ten gradients of one
3.162
>>> optimizer.step(0)
0.1
>>> sorted(optimizer.state())
['exp_avg/bias', 'exp_avg/weight', 'exp_avg_sq/bias', 'exp_avg_sq/weight']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from t2t.config import Optim
from t2t.errors import InputError
from t2t.optim.adafactor import Adafactor
from t2t.optim.lamb import Lamb
from t2t.parallel import Ranks

# (optimizer, family) → (fine-tuning, from scratch).
_RATES: dict[tuple[str, str], tuple[float, float]] = {
    # T5 wants larger rates than its peers: 1e-4 to 3e-4 is usual in fine-tuning; small models start well at 1e-3.
    ("adamw", "t5"): (3e-4, 1e-3),
    # GPT-2 fine-tunes at 5e-5; from scratch 6e-4 is for batches of half a million tokens, half of it for ours.
    ("adamw", "gpt"): (5e-5, 3e-4),
    # The BERT paper: 2e-5 to 5e-5 in fine-tuning, 1e-4 in pretraining.
    ("adamw", "bert"): (5e-5, 1e-4),
    # An unknown model: rates that hardly any transformer diverges at.
    ("adamw", ""): (5e-5, 1e-4),
    # The T5 paper fine-tunes at 1e-3; its 1e-2 from scratch is for scale_parameter = true and too much without.
    ("adafactor", "t5"): (1e-3, 1e-3),
    # Without momentum and with its updates clipped, Adafactor bears about twice AdamW's rate.
    ("adafactor", "gpt"): (1e-4, 5e-4),
    ("adafactor", "bert"): (1e-4, 2e-4),
    ("adafactor", ""): (1e-4, 2e-4),
    # The LAMB paper: about 4e-3 for BERT's large batches, less for ours; half of it in fine-tuning.
    ("lamb", "t5"): (1e-3, 2e-3),
    ("lamb", "gpt"): (1e-3, 2e-3),
    ("lamb", "bert"): (1e-3, 4e-3),
    ("lamb", ""): (1e-3, 2e-3),
}

# (tuning method, family) → rate. An adapter is small and starts from nothing: it bears far larger rates.
_ADAPTER_RATES: dict[tuple[str, str], float] = {
    # About ten times what suits all weights; T5 trains at larger rates anyway.
    ("lora", "t5"): 1e-3,
    ("lora", ""): 5e-4,
    # The prompt-tuning paper: 0.3 for T5, whose embeddings are large numbers.
    ("prompt", "t5"): 0.3,
    ("prompt", ""): 3e-2,
}

# Devices with a fused AdamW: one pass over memory, on a CPU four times as fast as foreach.
_FUSED = ("cpu", "cuda", "mps", "xpu")


def decay_groups(named: Mapping[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups for a torch optimizer: those that decay, and norms, biases and relative-bias tables.

    A tensor of at most one dimension is a norm or a bias, whatever its name; the tables of T5 are matrices.

    >>> model = {"block.0.k.weight": torch.ones(2, 2), "block.0.layer_norm.weight": torch.ones(2)}
    >>> [(group["weight_decay"], len(group["params"])) for group in decay_groups(model, 0.01)]
    [(0.01, 1), (0.0, 1)]
    """
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in named.items():
        groups[p.ndim > 1 and not name.endswith(".bias") and "relative_attention_bias" not in name].append(p)
    return [
        {"params": ps, "weight_decay": weight_decay if decays else 0.0, "adapt": decays}
        for decays, ps in groups.items()
        if ps
    ]


def default_lr(optimizer: str, family: str, from_scratch: bool, method: str = "none") -> float:
    """The peak rate when ``optim.lr`` is unset; families are t5, gpt and bert, any other gets a cautious rate.

    | optimizer | family | fine-tuning | from scratch |
    |---|---|---|---|
    | adamw | t5 | 3e-4 | 1e-3 |
    | adamw | gpt | 5e-5 | 3e-4 |
    | adamw | bert, others | 5e-5 | 1e-4 |
    | adafactor | t5 | 1e-3 | 1e-3 |
    | adafactor | gpt | 1e-4 | 5e-4 |
    | adafactor | bert, others | 1e-4 | 2e-4 |
    | lamb | bert | 1e-3 | 4e-3 |
    | lamb | t5, gpt, others | 1e-3 | 2e-3 |

    Under ``tune.method`` the adapter's, whatever the optimizer: LoRA 1e-3 (t5), 5e-4 (others); a soft prompt 0.3 (t5),
    0.03 (others).

    >>> default_lr("adamw", "t5", from_scratch=False), default_lr("adafactor", "mamba", from_scratch=True)
    (0.0003, 0.0002)
    """
    if method != "none":
        return _ADAPTER_RATES.get((method, family), _ADAPTER_RATES[method, ""])
    return _RATES.get((optimizer, family), _RATES[optimizer, ""])[from_scratch]


def schedule(settings: Optim, total_steps: int) -> Callable[[int], float]:
    """The factor of the peak rate for update n + 1, given n: a pure function, so that a resumed run needs no state.

    Warm-up rises by equal parts and reaches 1 at its last update; the first update is never at 0. Then the factor
    stays (constant), falls to 0 at n = ``total_steps`` in a line or half a cosine, so that the last update still
    moves, or is sqrt(warmup / update) (inverse_sqrt). Without warm-up the peak is the first update, as with warmup 1.

    >>> linear = schedule(Optim(warmup=2), total_steps=6)
    >>> [round(linear(n), 2) for n in range(7)]
    [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    """
    warmup = round(settings.warmup if settings.warmup >= 1 else settings.warmup * total_steps)
    peak = max(warmup, 1)

    def factor(n: int) -> float:
        update = n + 1
        if update <= peak:
            return update / peak
        if settings.schedule == "constant":
            return 1.0
        if settings.schedule == "inverse_sqrt":
            return math.sqrt(peak / update)
        progress = min((update - peak) / max(total_steps + 1 - peak, 1), 1.0)
        return 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2

    return factor


class Optimizer:
    """AdamW, Adafactor or LAMB over fp32 masters, keyed by parameter name.

    A parameter in fp32 is its own master; one of lower precision has a separate fp32 master with an fp32 gradient.
    Parameters that do not require gradients take no part. One that received no gradient in a step is left alone in it:
    neither moments nor decay touch it. Updates are counted for the whole run, not for each parameter, so weights,
    moments and the number of updates are all that there is to restore.

    >>> weight = nn.Parameter(torch.ones(3))
    >>> optimizer = Optimizer({"weight": weight}, Optim(), lr=0.1, schedule=lambda n: 0.5)
    >>> weight.grad = torch.ones(3)
    >>> optimizer.step(0), weight.grad
    (0.05, None)
    >>> weight.detach()
    tensor([0.9500, 0.9500, 0.9500])
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], settings: Optim, lr: float, schedule: Callable[[int], float]
    ) -> None:
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not trained:
            raise InputError("model.freeze: leaves no parameter to train; freeze fewer")
        self.updates = 0
        self._masters = {name: p.detach().float() if _low(p) else p for name, p in trained.items()}
        self._copies = [(p, self._masters[name]) for name, p in trained.items() if _low(p)]
        self._relative = settings.relative_step
        self.lr, self._schedule = lr, schedule
        groups = decay_groups(self._masters, settings.weight_decay)
        self._inner: Any = _INNER[settings.name](groups, settings, lr)  # a fused one reads its attribute `grad_scale`

    def accumulate(self) -> None:
        """After each micro-batch's backward: add low-precision gradients to their fp32 sums and free them.

        Gradients of fp32 parameters are summed by autograd already.

        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> optimizer = Optimizer({"weight": weight}, Optim(), lr=0.1, schedule=lambda n: 1.0)
        >>> for _ in range(2):
        ...     weight.grad = torch.full_like(weight, 1 / 3)
        ...     optimizer.accumulate()
        >>> weight.grad, round(optimizer.clip(0.0).item(), 3)
        (None, 0.668)
        """
        for p, master in self._copies:
            if p.grad is None:
                continue
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

    def reduce(self, ranks: Ranks) -> None:
        """After the last micro-batch: sum the fp32 gradients over ranks."""
        ranks.sum_gradients(self._masters.values())

    def clip(self, max_norm: float) -> Tensor:
        """The global norm of the fp32 gradients; where it is above ``max_norm`` (0: no limit) they are scaled to it.

        A fused AdamW scales them itself when it reads them, which saves a pass over memory.

        >>> weight = nn.Parameter(torch.zeros(2))
        >>> optimizer = Optimizer({"weight": weight}, Optim(name="adafactor"), lr=0.1, schedule=lambda n: 1.0)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.clip(1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
        """
        norm = nn.utils.get_total_norm([p.grad for p in self._masters.values() if p.grad is not None])
        if self._inner.defaults.get("fused"):
            self._inner.grad_scale = ((norm.float() + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else None
        elif max_norm > 0:
            nn.utils.clip_grads_with_norm_(self._masters.values(), max_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Make update ``step`` + 1, drop the gradients, and return the rate used.

        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = Optimizer({"weight": weight}, Optim(), lr=0.5, schedule=lambda n: 1.0)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.accumulate()
        >>> optimizer.step(0), weight.tolist()
        (0.5, [0.5, 0.5])
        """
        assert step == self.updates, f"update {self.updates} is next, not {step}"
        if not self._relative:
            for group in self._inner.param_groups:
                group["lr"] = self.lr * self._schedule(step)
        self._count(step)
        self._inner.step()
        self.updates += 1
        self._copy_back()
        self.zero_grad()
        return float(self._inner.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Drop all gradients.

        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> Optimizer({"weight": weight}, Optim(), lr=0.5, schedule=lambda n: 1.0).zero_grad()
        >>> weight.grad is None
        True
        """
        self._inner.grad_scale = None
        for master in self._masters.values():
            master.grad = None
        for p, _ in self._copies:
            p.grad = None

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights of the trained parameters by name: live tensors, not copies.

        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> Optimizer({"weight": weight}, Optim(), lr=0.5, schedule=lambda n: 1.0).weights()
        {'weight': tensor([1., 1.])}
        """
        return {name: master.detach().contiguous() for name, master in self._masters.items()}

    def state(self) -> dict[str, Tensor]:
        """The moments, flat, as kind/name: live tensors, not copies.

        >>> weight = nn.Parameter(torch.ones(2, 3))
        >>> settings = Optim(name="adafactor")
        >>> Optimizer({"weight": weight}, settings, lr=0.5, schedule=lambda n: 1.0).state()
        {'row/weight': tensor([0., 0.]), 'column/weight': tensor([0., 0., 0.])}
        """
        return {key: tensor.contiguous() for key, tensor in self._moments().items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], step: int) -> None:
        """Restore what ``weights`` and ``state`` gave after ``step`` updates, in place; the next update is ``step``.

        >>> weight = nn.Parameter(torch.ones(2))
        >>> optimizer = Optimizer({"weight": weight}, Optim(), lr=0.5, schedule=lambda n: 1.0)
        >>> optimizer.load({"wait": torch.ones(2)}, optimizer.state(), step=3)
        Traceback (most recent call last):
        t2t.errors.InputError: weights do not fit this model: missing weight; unexpected wait
        """
        masters = {name: master.detach() for name, master in self._masters.items()}
        moments = self._moments()
        _check("weights do not fit this model", weights, masters)
        _check("optimizer state does not fit this model and optimizer", state, moments)
        for name, master in masters.items():
            master.copy_(weights[name])
        for key, tensor in moments.items():
            tensor.copy_(state[key])
        self.updates = step
        self._copy_back()
        self.zero_grad()

    def _moments(self) -> dict[str, Tensor]:
        states = ((name, self._inner.state[master]) for name, master in self._masters.items())
        return {f"{kind}/{name}": moment for name, state in states for kind, moment in state.items() if kind != "step"}

    def _count(self, updates: int) -> None:
        """Tell the inner optimizer how many updates came before, also for parameters that missed some."""
        if isinstance(self._inner, Adafactor | Lamb):
            for group in self._inner.param_groups:
                group["step"] = updates
            return
        steps = [self._inner.state[master]["step"] for master in self._masters.values()]
        torch._foreach_zero_(steps)
        torch._foreach_add_(steps, float(updates))

    def _copy_back(self) -> None:
        if self._copies:
            torch._foreach_copy_([p for p, _ in self._copies], [master for _, master in self._copies])


def state_bytes(named: Mapping[str, nn.Parameter], settings: Optim) -> int:
    """Bytes that training adds to the model's weights: gradients, fp32 masters and moments, at their largest.

    fp32 parameters take 12 bytes each with AdamW and a little above 4 with Adafactor; bf16 ones 18 and 10, counting
    their own gradients, which live until ``accumulate`` has summed them.

    >>> model = {"weight": nn.Parameter(torch.zeros(10, 10)), "frozen": nn.Parameter(torch.zeros(5), False)}
    >>> state_bytes(model, Optim()), state_bytes(model, Optim(name="adafactor"))
    (1200, 480)
    """
    total = 0
    for p in named.values():
        if p.requires_grad:
            gradient = p.numel() * p.element_size()
            total += gradient + (8 * p.numel() if _low(p) else 0) + _moment_bytes(p, settings)
    return total


def _moment_bytes(p: Tensor, settings: Optim) -> int:
    if settings.name != "adafactor":
        numbers = 2 * p.numel()
    elif p.ndim >= 2:
        numbers = p.shape[:-1].numel() + (p.shape[:-2] + p.shape[-1:]).numel()
    else:
        numbers = p.numel()
    return numbers * max(p.element_size(), 4)


def _low(p: Tensor) -> bool:
    return p.element_size() < 4


def _adamw(groups: list[dict[str, Any]], settings: Optim, lr: float) -> torch.optim.Optimizer:
    fused = all(p.device.type in _FUSED for group in groups for p in group["params"])
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=fused or None)
    for group in groups:
        for p in group["params"]:
            # Made now rather than at the first step: names are complete from the start and memory does not grow later.
            # Only the fused kernel reads the count on the device; elsewhere that would wait for the device.
            count = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
            optimizer.state[p] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def _adafactor(groups: list[dict[str, Any]], settings: Optim, lr: float) -> torch.optim.Optimizer:
    return Adafactor(
        groups,
        lr=None if settings.relative_step else lr,
        scale_parameter=settings.scale_parameter,
        relative_step=settings.relative_step,
    )


def _lamb(groups: list[dict[str, Any]], settings: Optim, lr: float) -> torch.optim.Optimizer:
    return Lamb(groups, lr=lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)


_INNER = {"adamw": _adamw, "adafactor": _adafactor, "lamb": _lamb}


def _check(what: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    faults = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [name for name in given if name not in wanted],
        "of another shape": [
            f"{name} {tuple(given[name].shape)} instead of {tuple(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in given and given[name].shape != tensor.shape
        ],
    }
    if any(faults.values()):
        raise InputError(f"{what}: " + "; ".join(f"{fault} {_few(names)}" for fault, names in faults.items() if names))


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
