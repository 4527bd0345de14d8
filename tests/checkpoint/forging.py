"""Checkpoints that somebody changed, with checksums that suit: and what may come of it.

A mutation changes one thing: a value of a manifest or header, bytes of a file, or what
lies under a file's name. A load may then give what was saved, or refuse.
"""

import copy
import json
import os
import random
import shutil
import signal
import zlib
from contextlib import contextmanager
from pathlib import Path

import torch

import fsfunc as ff
from fsfunc.checkpoint.reading import prove
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.tree.structure import TreeMismatch
from tests.checks import same

NASTY = [
    -1, 0, 1, 2, 3, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**30, 0.5,
    float("nan"), float("inf"), True, False, None, "", "x", "../outside", "/etc/passwd",
    "a\0b", "\ud800", "float32", "float64", "int32", "load", "float128", "F32", "I32",
    "shard-00001-model-00001-of-00001.safetensors", "0" * 8, "g" * 8, "cpu", [], {},
    [[]], [0], [-1], [1, 2], [0, 0, 0], ["a"], {"a": 1}, [[0, 0, [0], [1]]],
]  # fmt: skip


def text_of(body):
    """A manifest, with a checksum that suits it."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"crc32": %d, "body":\n%s\n}\n' % (zlib.crc32(text), text)


def body_of(path):
    return json.loads((path / "fsfunc.json").read_bytes())["body"]


def head_of(data):
    """The header of a safetensors file, and its data."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_head(head, data):
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def places(x):
    """(container, key) of every value of a tree of JSON."""
    found, level = [], [x]
    while level:
        node = level.pop()
        keys = node if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                level.append(node[key])
    return found


def changed(said, draw):
    """A copy of a table in which one thing is another."""
    said = copy.deepcopy(said)
    node, key = draw.choice(places(said))
    act = draw.randrange(8)
    if act < 3:
        node[key] = draw.choice(NASTY)
    elif act == 3:
        del node[key]
    elif act == 4 and type(node[key]) is int:
        node[key] += draw.choice([-1, 1, 4, 8, -8, 1 << 20])
    elif act == 5:
        other, place = draw.choice(places(said))
        if not (isinstance(other[place], dict | list) or isinstance(node[key], dict)):
            node[key], other[place] = other[place], node[key]
    elif act == 6 and isinstance(node, list):
        node.insert(draw.randrange(len(node) + 1), copy.deepcopy(node[key]))
    elif isinstance(node, dict):
        node[str(draw.choice(NASTY))] = node.pop(key)
    return said


def with_other_bytes(data, draw):
    data = bytearray(data)
    at = draw.randrange(len(data))
    match draw.randrange(5):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        case 3:
            data[at : at + 16] = bytes(len(data[at : at + 16]))
        case 4:
            del data[at : at + draw.randrange(1, 9)]
    return bytes(data)


def replace_file(file, draw, outside):
    """Puts something else in the place of a file: nothing, a link, a pipe, a folder."""
    file.unlink()
    match draw.randrange(6):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to(draw.choice([outside / file.name, "/dev/zero", file.name]))
        case 2:
            file.mkdir()
        case 3:
            file.symlink_to(os.path.relpath(outside / file.name, file.parent))
        case 4:
            others = sorted(p for p in file.parent.iterdir() if p.is_file())
            if others:
                shutil.copy(draw.choice(others), file)


class Victim:
    """A checkpoint to change, and one of another state outside of its folder."""

    def __init__(self, folder, save):
        self.path, self.outside = folder / "victim", folder / "outside"
        self.state = save(self.path, 1.0)
        save(self.outside, 2.0)
        self.files = {p.name: p.read_bytes() for p in self.path.iterdir()}
        self.files.pop("config.json", None)
        self.target = ff.tree.map(
            lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else type(x)(),
            self.state,
        )

    def restore(self):
        for file in self.path.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)

    @contextmanager
    def saying(self, body):
        """While its manifest says this, in time."""
        (self.path / "fsfunc.json").write_bytes(text_of(body))
        try:
            with in_time(60):
                yield
        finally:
            self.restore()

    def mutate(self, draw):
        file = self.path / draw.choice(sorted(self.files))
        data = self.files[file.name]
        kind = draw.randrange(10)
        if kind == 0:
            replace_file(file, draw, self.outside)
        elif kind < 4:
            file.write_bytes(with_other_bytes(data, draw))
        elif (self.path / "fsfunc.json").exists():
            body = changed(body_of(self.path), draw)
            (self.path / "fsfunc.json").write_bytes(text_of(body))
        elif file.suffix == ".json":
            file.write_text(json.dumps(changed(json.loads(data), draw)))
        else:
            head, rest = head_of(data)
            file.write_bytes(with_head(changed(head, draw), rest))

    def judge(self, proven):
        """Loads it; returns what was refused. Any other exception comes out.

        Args:
            proven: there are checksums: whatever is loaded is what was saved.
        """
        try:
            found = ff.load(self.path, self.target, random=False)
        except (CheckpointError, TreeMismatch) as error:
            return str(error)
        except ValueError as error:  # of another shape or dtype than the target
            assert str(error).startswith(f"cannot load {self.path}")
            return str(error)
        if proven:
            stored = ff.metadata(self.path)  # numbers are what the manifest says
            tensors = lambda t: [x for x in ff.tree.leaves(t) if torch.is_tensor(x)]  # noqa: E731
            same(tensors(found), tensors(self.state))
            prove(stored)
        return None


@contextmanager
def in_time(seconds):
    """Raises where it takes longer."""

    def late(*_):
        raise TimeoutError(f"it hangs: {seconds} s are over")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(victim, seeds, proven):
    """Changes it once a seed; returns how many of them were refused."""
    refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        victim.mutate(draw)
        try:
            with in_time(60):
                refused += victim.judge(proven) is not None
        except Exception as error:
            error.add_note(f"seed {seed}: {Path(victim.path).name}")
            raise
        finally:
            victim.restore()
    return refused
