"""GRPO with TRL: reward answers that name the file and the word that the task is about.

python examples/trl_switch/trl_grpo.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir runs/trl --max_steps 20
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

WORDS = ("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "chair")


def names_both(completions, word, file, **kwargs):
    """Half a point for the word and half a point for the file, in the last message."""
    texts = [completion[-1]["content"] for completion in completions]
    return [0.5 * (w in text) + 0.5 * (f in text) for text, w, f in zip(texts, word, file, strict=True)]


dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": f"Write {word} into {word}.txt"}], "word": word, "file": f"{word}.txt"}
        for word in WORDS
    ]
)

if __name__ == "__main__":
    args, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=names_both,
        args=args,
        train_dataset=dataset,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(args.output_dir)
