"""Completes prompts with the demo model through Transformers, to look at what it learnt.

    python -m models.complete --temperature 0.7 --seed 1 "def read_lines(path):"

It is a reference beside moonserve, not part of it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import demo_model_path


def complete(
    model_path: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """The model's continuation of ``prompt``; greedy if ``temperature`` is 0."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
    greedy = {"do_sample": False, "temperature": None, "top_p": None}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        **(sampling if temperature > 0.0 else greedy),
    )
    continuation = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(continuation, skip_special_tokens=True))


def as_chat(model_path: Path, message: str) -> str:
    """The prompt, without bos, that asks for an answer to one user message."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return str(rendered).removeprefix(tokenizer.bos_token)


def main() -> None:
    """Complete one prompt."""
    parser = argparse.ArgumentParser(description="Complete a prompt with the demo model.")
    parser.add_argument("prompt")
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user message")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompt = as_chat(arguments.model, arguments.prompt) if arguments.chat else arguments.prompt
    continuation = complete(
        arguments.model,
        prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(continuation)


if __name__ == "__main__":
    main()
