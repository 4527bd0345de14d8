"""What the tests of modules share: small modules, and how they are run."""

import logging

import torch
from torch import nn

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device
from tests import checks
from tests.checks import simulated
from tests.models import train_step

VOCABULARY, WIDTH, LENGTH = 31, 16, 6
SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": WIDTH, "intermediate_size": 32, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}  # fmt: skip


class Block(nn.Module):
    """A residual block with a norm, and dropout where asked for."""

    def __init__(self, width=4, p=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(p)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, scale=1):
        return x + scale * self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """An embedding, blocks, and a head that is tied to the embedding."""

    def __init__(self, n=3, width=4, p=0.0):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width, p) for _ in range(n))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32,
        bos_token_id=0, eos_token_id=0, **(off | options),
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(SIZES | options))).double()


def mixtral(**options):
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**(SIZES | {"num_local_experts": 3} | options))
    ).double()


def hugging_face(make, **options):
    """A model from a config, its weights random and its advice unheard."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    return make(**options)


def text(rows=8):
    """Tokens, and a mask that hides the ends of some rows."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=seeded(1))
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[1::2, LENGTH - 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def language_loss(logits, batch):
    """The cross entropy of every next token, each alike: a mean over ranks is exact."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, batch["input_ids"][:, 1:].reshape(-1))


def step_of(apply, buffers, optimizer, loss=language_loss):
    """The train step of a model that takes a batch's entries and returns logits."""

    def loss_fn(params, batch):
        out = apply(params, buffers, **batch)
        return loss(out.logits, batch)

    return train_step(loss_fn, optimizer)


def trained(module, batch, steps=2, lr=1e-2):
    """(losses, tensors by name) of the module itself under torch.optim.AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = language_loss(module(**batch).logits, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def on_mesh(transform, axes, params, step, optimizer, batch, steps=2, record="fake"):
    """(losses, whole parameters, ledgers) of rank 0, after steps on simulated ranks.

    `transform(step, mesh)`; an axis named "data" has its part of the batch.
    """
    mesh = ff.make_mesh(axes, "simulated")
    how = {"mesh": mesh, "steps": steps, "record": record}
    run = checks.trained(transform(step, mesh), params, optimizer, batch, **how)[0]
    return run.outs, run.params, run.logs


def splits_as_one_device(
    module, batch, loss, units, plan, size=2, bound=1e-6, step=None
):
    """Asserts that a module has its own loss and gradients where a plan splits it."""
    apply, params, buffers = ff.from_module(module, units, plan=plan, axis="model")

    def of(params, batch):
        out = apply(params, buffers, **batch)
        return loss(getattr(out, "logits", out), batch)

    step = (step or ff.value_and_grad)(of)
    how = {"axis": (), "layouts": apply.layouts, "calls": 1, "tolerance": bound}
    assert apply.layouts
    assert_equals_one_device(step, step, simulated(model=size), params, batch, **how)


def close(one, other, bound=1e-9):
    """Asserts that two lists or dicts of tensors are the same but for rounding."""
    torch.testing.assert_close(one, other, rtol=bound, atol=bound)
