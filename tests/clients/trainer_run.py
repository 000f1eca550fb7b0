"""A transformers Trainer run on a tiny language model with random weights and random text."""

import json
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

if "--gradsync" in sys.argv:
    import gradsync

    gradsync.replace_torch_ddp()


class RandomText(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing="--checkpointing" in sys.argv,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=RandomText(), eval_dataset=RandomText())
        trainer.train()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        result = {
            "wrapper": type(trainer.model_wrapped).__module__,
            "bare": type(trainer.model).__name__,
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "gradient norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
            "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        }
        print("RESULT", json.dumps(result))


main()
