"""The module of `loop_lightning_before.py`, trained by a pipeline under Lightning's own Trainer.

torchrun --nproc-per-node 2 examples/loop_lightning.py checkpoints [checkpoint to go on from]
"""

import sys
from pathlib import Path

import lightning

sys.path.insert(0, str(Path(__file__).parent))
from loop_lightning_before import Classifier, data, trainer

from penstock.integrations.loops.lightning import PipelineStrategy

if __name__ == "__main__":
    lightning.seed_everything(0)
    train, held_out = data()
    module, example = Classifier(), next(iter(train))
    strategy = PipelineStrategy(example)
    ckpt_path = sys.argv[2] if len(sys.argv) > 2 else None
    trainer(sys.argv[1], devices=2, strategy=strategy).fit(
        module, train, held_out, ckpt_path=ckpt_path
    )
