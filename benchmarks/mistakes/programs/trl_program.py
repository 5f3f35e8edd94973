"""GRPO of TRL on a small language model, healthy or with a fault of `esper_telemetry.lab.language_models`.

python trl_program.py --fault mask_shift
"""

import argparse
from pathlib import Path

from transformers import PrinterCallback

from esper_telemetry.lab.language_models import FAULTS, HEALTHY, build_trainer
from esper_telemetry.lab.small_language_model import save_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--fault", default="healthy")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
fault = {one.name: one for one in (HEALTHY, *FAULTS)}[args.fault]
model = save_model(Path("model").resolve(), seed=args.seed)
trainer = build_trainer(model, seed=args.seed, steps=args.steps, rewards=fault.reward, trainer=fault.trainer, **fault.settings)
trainer.remove_callback(PrinterCallback)
trainer.train()
