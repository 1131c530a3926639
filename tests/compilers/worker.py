"""Run the corpus as this process's environment wants kernels built; a line of JSON a program.

python -m tests.compilers.worker --random 20 --skip 3
"""

from __future__ import annotations

import argparse
import json

import torch

from tests.compilers.corpus import corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="programs already done")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    for name, check in list(corpus(arguments.random).items())[arguments.skip :]:
        try:
            message = check()
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        print(json.dumps({"program": name, "wrong": message}), flush=True)


if __name__ == "__main__":
    main()
