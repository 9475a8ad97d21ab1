import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tile_ep import Buffer


def moe_layer(rank: int, num_ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(rank)
    x = torch.randn(16, 256, dtype=torch.bfloat16)  # the tokens of this rank
    topk_weights, topk_idx = torch.rand(16, 8).topk(2)  # the router: 2 of 8 experts a token
    with Buffer(num_max_tokens_per_rank=16, hidden=256, num_topk=2, num_experts=8) as buffer:
        rows, idx, weights, handle, _ = buffer.dispatch(x, topk_idx, topk_weights)
        expert = idx + 8 // num_ranks * rank  # idx counts this rank's experts from 0, -1 is elsewhere
        factor = (weights * expert * (idx >= 0)).sum(dim=1, keepdim=True)  # expert e multiplies by e
        y, _, _ = buffer.combine((rows * factor).to(x.dtype), handle)
    torch.testing.assert_close(y.float(), x * (topk_weights * topk_idx).sum(dim=1, keepdim=True), rtol=0.02, atol=0.02)
    print(f"rank {rank}: sent {len(x)} tokens, ran its experts on {len(rows)} rows, got {len(y)} sums back")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(moe_layer, args=(2, folder + "/store"), nprocs=2)
