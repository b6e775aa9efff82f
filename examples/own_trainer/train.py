"""A training script as somebody may have one: PyTorch, its own flags, its own log. It knows nothing of Trireme."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
for flag in ("width", "depth", "heads", "vocab", "length", "batch", "micro", "iters"):
    parser.add_argument(f"--{flag}", type=int, required=True)
parser.add_argument("--shard", action="store_true", help="FSDP in place of DDP")
parser.add_argument("--checkpoint", action="store_true", help="recompute blocks in backward")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, args.heads, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(args.depth)
        )
        self.head = nn.Linear(args.width, args.vocab)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens)
        for block in self.blocks:
            if args.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(x)


model = Model()
if args.shard:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(1)

for iteration in range(1, args.iters + 1):
    began = time.perf_counter()
    batch = torch.randint(args.vocab, (args.batch, args.length + 1), generator=data)
    mine = batch[rank::world].split(args.micro)
    total = torch.zeros(())
    for part in mine:
        logits = model(part[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / len(mine)
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"[it {iteration}] xent={total.item() / world:.6f} took {1000 * (time.perf_counter() - began):.1f}ms", flush=True)
dist.destroy_process_group()
