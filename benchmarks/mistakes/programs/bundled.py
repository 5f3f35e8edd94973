"""The bundled trainer, healthy or with a fault of `esper_telemetry.lab.faults` from its first update on.

python bundled.py cartpole --fault adv_sign
python bundled.py CartPole-v1 --policy lstm --mask-velocity --settings '{"precision": "bf16"}'
"""

from __future__ import annotations

import argparse
import hashlib
import json
from contextlib import nullcontext
from pathlib import Path

import torch

from esper_telemetry import Telemetry, attach
from esper_telemetry.lab.faults import inject
from esper_telemetry.lab.faults.runs import FaultEnvironment, find_environment, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", default="cartpole")
    parser.add_argument("--run-dir", type=Path, help="directory of telemetry, which is off without it")
    parser.add_argument("--fault")
    parser.add_argument("--dose", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--policy", help="use the preset of this policy: mlp, lstm or gru")
    parser.add_argument("--mask-velocity", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of PPOConfig as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    environment = FaultEnvironment(args.env, args.policy, args.mask_velocity) if args.policy else find_environment(args.env)
    trainer = environment.trainer(args.seed, **args.settings)
    broken = inject(trainer, args.fault, args.dose) if args.fault else nullcontext()
    level = "debug" if args.run_dir else "off"
    with Telemetry([], run_dir=args.run_dir, level=level, offload=False) as telemetry, broken:
        attach(telemetry, trainer)
        train(trainer, updates=args.updates, planned=args.updates)
    parameters = torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])
    print("weights", hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12])


if __name__ == "__main__":
    main()
