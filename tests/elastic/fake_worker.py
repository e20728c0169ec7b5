"""A worker without jax for tests of the control plane: it speaks the protocol and invents its losses.

    python fake_worker.py [--fault FAULT@NODE:STEP] [--step-s SECONDS] --control-fd N

FAULT is one of raise, exit, kill (the others say at once that they lost their peer), hang (never votes; the others say
that they wait for it), discord (a wrong checksum) and nan. Only a node's first worker has it. All workers invent the
same numbers for the same step, whatever the plan. Evaluations are reported after every step; the coordinator takes
those that it asked for. Their checkpoints have a manifest, and nothing else.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.lifeline import hold
from oobleck_jax.planning.plan import NodeId, Plan


def loss_of(step: int) -> float:
    """The mean loss that these workers report."""
    return 5.5 / (1 + 0.1 * step)


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.control = socket.socket(fileno=options.control_fd)
        self.lines = self.control.makefile("rb")
        self.step_s: float = options.step_s
        self.fault, at_node, self.fault_step = parse_fault(options.fault)
        self.fault_node = NodeId(at_node)
        self.incarnation: int = options.incarnation
        if self.incarnation:
            self.fault_step = -1
        welcome = self.receive()
        assert isinstance(welcome, messages.Welcome)
        self.node = welcome.node
        config = json.loads(welcome.config_json)
        self.microbatch_tokens = config.get("microbatch_size", 4) * config.get("sequence_length", 128)

    def receive(self) -> messages.ToNode:
        line = self.lines.readline()
        if not line:
            os._exit(1)  # the agent is gone
        return messages.decode_to_node(line)

    def send(self, message: messages.ToCoordinator) -> None:
        self.control.sendall(messages.encode(message) + b"\n")

    def run(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        print(f"node {self.node}, worker {self.incarnation} is up on cores {cores}", flush=True)
        self.send(
            messages.WorkerReady(
                node=self.node,
                incarnation=self.incarnation,
                link_address="127.0.0.1:1",
                num_devices=1,
                device_kind="invented",
            )
        )
        while True:
            match self.receive():
                case messages.Begin() as begin:
                    self.prepare(begin)
                case messages.Run() as run:
                    self.work(run.step)
                case messages.Commit() as commit:
                    self.evaluate(commit.step)
                    self.work(commit.step + 1)
                case messages.SaveCheckpoint() as save:
                    self.save(save)
                case messages.Stop():
                    print("stopped", flush=True)
                    return
                case _:
                    pass

    def prepare(self, begin: messages.Begin) -> None:
        self.plan: Plan = begin.plan
        self.generation = begin.generation
        cores = next(member.cores for member in begin.members if member.node == self.node)
        if cores:
            os.sched_setaffinity(0, cores)
        for done in (1, 2):
            self.send(
                messages.Progress(node=self.node, generation=begin.generation, phase="compile", done=done, total=2)
            )
        self.send(
            messages.Prepared(node=self.node, generation=begin.generation, num_compilations=2, seconds={"compile": 0.0})
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the last stages of this node."""
        return sum(
            pipeline.num_microbatches * self.microbatch_tokens
            for pipeline in self.plan.pipelines
            if self.node == pipeline.node_of(len(pipeline.template.stages) - 1)
        )

    def work(self, step: int) -> None:
        time.sleep(self.step_s)
        groups = [
            messages.GroupReport(group=f"layer {layer}", squared_norm=0.25 / (1 + layer), checksum=step * 1000 + layer)
            for layer in self.plan.layers_of(self.node)
        ]
        is_finite = True
        if step == self.fault_step and self.node == self.fault_node:
            match self.fault:
                case "raise":
                    self.fail("ValueError: invented trouble")
                case "exit":
                    sys.exit(3)
                case "kill":
                    time.sleep(0.1)  # time for the others to complain first
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(1000)
                case "discord":
                    groups[0] = messages.GroupReport(group="layer 0", squared_norm=0.25, checksum=1)
                case _:
                    is_finite = False
        elif step == self.fault_step and self.fault == "kill":
            self.fail(f"PeerLost: node {self.fault_node} is gone", blames=self.fault_node)
        elif step == self.fault_step and self.fault == "hang":
            waiting = messages.Waiting(node=self.node, generation=self.generation, step=step, waits_for=self.fault_node)
            self.send(waiting)
            return
        self.send(
            messages.Vote(
                node=self.node,
                generation=self.generation,
                step=step,
                loss_sum=loss_of(step) * self.num_tokens,
                num_tokens=self.num_tokens,
                is_finite=is_finite,
                groups=tuple(groups),
                seconds={"compute": self.step_s},
            )
        )

    def save(self, save: messages.SaveCheckpoint) -> None:
        """Write a checkpoint of nothing."""
        Path(save.folder).mkdir(parents=True, exist_ok=True)
        saved = messages.Saved(node=self.node, generation=save.generation, step=save.step, groups={}, seconds={})
        self.send(saved)

    def evaluate(self, step: int) -> None:
        if self.num_tokens:
            self.send(
                messages.Evaluated(
                    node=self.node,
                    generation=self.generation,
                    step=step,
                    loss_sum=2.0 * self.num_tokens,
                    num_tokens=self.num_tokens,
                )
            )

    def fail(self, error: str, blames: NodeId | None = None) -> None:
        self.send(
            messages.Failed(
                node=self.node,
                incarnation=self.incarnation,
                generation=self.generation,
                error=error,
                traceback=f"Traceback (invented)\n{error}",
                blames=blames,
            )
        )
        sys.exit(1)


def parse_fault(text: str | None) -> tuple[str, int, int]:
    if not text:
        return "", -1, -1
    fault, _, where = text.partition("@")
    node, _, step = where.partition(":")
    return fault, int(node), int(step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--fault")
    parser.add_argument("--step-s", type=float, default=0.005)
    options, _ = parser.parse_known_args()
    if options.lifeline_fd is not None:
        hold(options.lifeline_fd)
    Worker(options).run()


if __name__ == "__main__":
    main()
