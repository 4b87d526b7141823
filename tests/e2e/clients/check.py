"""Calls a cluster as LangChain and LiteLLM do. Fails if a reply is not as promised.

Usage: python check.py URL KEY MODEL, with the packages of requirements.txt.
"""

import sys
from typing import Any, Literal

import litellm
import pydantic
import pytest
from langchain_openai import ChatOpenAI, OpenAI

url, key, model = sys.argv[1:]
SYSTEM, QUESTION = "You write Python.", "Complete this Python code:\ndef get_name(self):"


class Paint(pydantic.BaseModel):
    """Paints."""

    color: Literal["red", "blue"]


def langchain() -> str:
    common: dict[str, Any] = {
        "base_url": f"{url}/v1",
        "api_key": key,
        "model": model,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**common, max_tokens=24)
    asked = [("system", SYSTEM), ("human", QUESTION)]
    answer = chat.invoke(asked)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] == 24
    assert "".join(part.text for part in chat.stream(asked)) == answer.text
    assert [each.text for each in chat.batch([asked] * 3)] == [answer.text] * 3
    assert ChatOpenAI(**common, max_tokens=24, use_responses_api=True).invoke(asked).text == answer.text
    longer = ChatOpenAI(**common, max_tokens=200)
    [call] = longer.bind_tools([Paint], tool_choice="Paint", strict=True).invoke(asked).tool_calls
    Paint.model_validate(call["args"])
    assert isinstance(longer.with_structured_output(Paint, method="json_schema").invoke(asked), Paint)
    assert OpenAI(**common, max_tokens=8).invoke("def get_name(self):")
    return answer.text


def lite_llm(answer: str) -> None:
    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": key, "max_tokens": 24, "temperature": 0}
    common |= {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]}
    whole = litellm.completion(model=f"hosted_vllm/{model}", **common)
    assert whole.choices[0].message.content == answer
    assert whole.usage.completion_tokens == 24
    parts = litellm.completion(model=f"hosted_vllm/{model}", **common, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer
    with pytest.raises(litellm.NotFoundError, match="gpt-9"):
        litellm.completion(model="hosted_vllm/gpt-9", **common)


lite_llm(langchain())
