"""Train a small Mixture-of-Experts language model on text files, with its experts dealt to several processes.

    python examples/train_moe.py --ranks 2                     # 200 steps over two processes
    python examples/train_moe.py --ranks 2 --plot loss.png     # then the same over one, and both curves

The text is the README of this project and sources of the Python standard library; a token is a byte. Every process
holds the whole model but the experts, of which it holds its share, and a share of each batch. The run over many
processes follows the run over one: same seeds, same batches, sums that differ by rounding only.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from tile_ep import Buffer
from tile_ep.nn import MoE, shared_parameters

VOCABULARY = 256


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of the run. `batch` is over all processes."""

    steps: int = 200
    batch: int = 16
    context: int = 64
    hidden: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 8
    topk: int = 2
    intermediate: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


# ---------------------------------------------------------------- model


class Block(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, buffer: Buffer, settings: Settings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.qkv = nn.Linear(settings.hidden, 3 * settings.hidden)
        self.out = nn.Linear(settings.hidden, settings.hidden)
        self.expert_norm = nn.LayerNorm(settings.hidden)
        self.experts = MoE(
            buffer,
            settings.hidden,
            settings.intermediate,
            settings.experts,
            settings.topk,
            dtype=torch.float32,
            expert_alignment=1,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.experts(self.expert_norm(x))


class LanguageModel(nn.Module):
    """Bytes `[B, S]` to logits `[B, S, 256]` of the byte that follows each."""

    def __init__(self, buffer: Buffer, settings: Settings) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, settings.hidden)
        self.positions = nn.Parameter(0.1 * torch.randn(settings.context, settings.hidden))
        self.blocks = nn.Sequential(*(Block(buffer, settings) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.bytes(text) + self.positions)))


# ---------------------------------------------------------------- training


def load_text() -> torch.Tensor:
    """The bytes of the README and of the standard library's modules, int64."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [Path(__file__).parent.parent / "README.md", *sorted(library.glob("*.py"))]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def train(rank: int, num_ranks: int, settings: Settings) -> list[float]:
    """Train over the default process group and return the loss of every step, over the whole batch."""
    torch.manual_seed(settings.seed)  # the same on all ranks: whole parameters are equal, experts parts of one set
    text = load_text()
    batches = torch.Generator().manual_seed(settings.seed)
    rows = settings.batch // num_ranks
    losses = []
    with Buffer(
        num_max_tokens_per_rank=rows * settings.context,
        hidden=settings.hidden,
        num_topk=settings.topk,
        num_experts=settings.experts,
        dtype=torch.float32,
        expand_factor=num_ranks,  # room for every selection, however the router behaves
    ) as buffer:
        model = LanguageModel(buffer, settings)
        shared = list(shared_parameters(model))
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, eps=1e-6)
        for step in range(settings.steps):
            starts = torch.randint(len(text) - settings.context, (settings.batch,), generator=batches)
            mine = starts[rank * rows : (rank + 1) * rows]
            sequences = text[mine[:, None] + torch.arange(settings.context + 1)]
            logits = model(sequences[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction="sum")
            loss = loss / (settings.batch * settings.context)  # so that the losses of all ranks add up
            optimizer.zero_grad()
            loss.backward()
            losses.append(add_over_ranks(loss.detach(), shared))
            optimizer.step()
            if rank == 0 and (step % 20 == 0 or step == settings.steps - 1):
                print(f"ranks={num_ranks} step {step:4d}: loss {losses[-1]:.4f}", flush=True)
    return losses


def add_over_ranks(loss: torch.Tensor, shared: list[nn.Parameter]) -> float:
    """Sum the gradients of `shared` over all ranks, in place, and the loss; the experts' are sums already."""
    gradients = [parameter.grad for parameter in shared]
    flat = torch.cat([loss.reshape(1), *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    sums = flat[1:].split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
    return flat[0].item()


# ---------------------------------------------------------------- processes


def process(rank: int, num_ranks: int, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    losses = train(rank, num_ranks, settings)
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def run(num_ranks: int, settings: Settings) -> tuple[list[float], float]:
    """Losses of a run over `num_ranks` processes, and its seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, args=(num_ranks, settings, folder), nprocs=num_ranks)
        return json.loads(Path(folder, "losses.json").read_text()), time.monotonic() - started


def plot(curves: dict[int, list[float]], path: str) -> None:
    """Loss curves by number of processes, and below how far each is from the run over one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5.5), sharex=True, height_ratios=(2, 1))
    single = torch.tensor(curves[1], dtype=torch.float64)
    styles = [("#4c72b0", "-", 3.5), ("#dd8452", "--", 1.5), ("#2b2b2b", ":", 1.5)]
    for (num_ranks, losses), (colour, line, width) in zip(sorted(curves.items()), styles, strict=False):
        name = f"{num_ranks} process" + "es" * (num_ranks > 1)
        above.plot(losses, line, color=colour, linewidth=width, label=name)
        if num_ranks > 1:
            difference = (torch.tensor(losses, dtype=torch.float64) - single).abs() / single
            below.plot(difference, ".", color=colour, markersize=4 if num_ranks == 2 else 2.5)
    above.set_ylabel("loss, nats per byte")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    below.set_ylabel("relative difference\nto 1 process")
    epsilon = torch.finfo(torch.float32).eps
    below.axhline(epsilon, color="grey", linewidth=0.8)
    below.annotate(
        f"fp32 epsilon, {epsilon:.1e}",
        (len(single) - 1, epsilon),
        (0, 3),
        textcoords="offset points",
        ha="right",
        color="grey",
        fontsize=8,
    )
    below.set_ylim(bottom=-0.1 * epsilon)
    below.set_ylim(top=max(below.get_ylim()[1], 3 * epsilon))
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=[1, 2, 4], default=[2], help="processes; several runs")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--json", metavar="FILE", help="write settings, losses and seconds of every run")
    parser.add_argument("--plot", metavar="FILE.png", help="also run over one process, and draw the loss curves")
    arguments = parser.parse_args()
    settings = Settings(steps=arguments.steps, seed=arguments.seed)

    worlds = dict.fromkeys([1, *arguments.ranks] if arguments.plot else arguments.ranks)
    runs = {num_ranks: run(num_ranks, settings) for num_ranks in worlds}
    curves = {num_ranks: losses for num_ranks, (losses, _) in runs.items()}
    for num_ranks, (losses, seconds) in runs.items():
        print(f"ranks={num_ranks}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {seconds:.0f} s")
        if 1 in curves and num_ranks > 1:
            worst = max(abs(a - b) / b for a, b in zip(losses, curves[1], strict=True))
            print(f"ranks={num_ranks}: largest relative difference to ranks=1: {worst:.1e}")
    if arguments.json:
        seconds = {num_ranks: round(taken, 1) for num_ranks, (_, taken) in runs.items()}
        document = {"settings": asdict(settings), "losses": curves, "seconds": seconds}
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    if arguments.plot:
        plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
