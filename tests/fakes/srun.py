"""A stand-in for srun: starts the tasks that it is asked for on this machine, with the variables that Slurm sets.

Understands `--nodes=N --ntasks=N --ntasks-per-node=N --nodelist=a,b` of what `srun` has, and passes over the rest.
Nodes are those of SLURM_JOB_NODELIST as `a,b`. Standard input goes to the first task.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    options: dict[str, str] = {}
    words = sys.argv[1:]
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        options[name] = value
    nodes = options.get("nodelist", os.environ["SLURM_JOB_NODELIST"]).split(",")[: int(options.get("nodes", 99))]
    each = int(options.get("ntasks-per-node", int(options.get("ntasks", len(nodes))) // len(nodes)))
    tasks = []
    for number in range(len(nodes) * each):
        variables = {
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": str(len(nodes) * each),
            "SLURM_STEP_NODELIST": ",".join(nodes),
            "SLURM_STEP_NUM_NODES": str(len(nodes)),
            "SLURM_STEP_NUM_TASKS": str(len(nodes) * each),
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{len(nodes)})" if len(nodes) > 1 else str(each),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number % each),
            "SLURM_NODEID": str(number // each),
            "SLURMD_NODENAME": nodes[number // each],
        }
        stdin = None if number == 0 else subprocess.DEVNULL
        tasks.append(subprocess.Popen(words, env={**os.environ, **variables}, stdin=stdin))
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
