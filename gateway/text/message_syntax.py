"""How one model writes messages: its reasoning and its calls of tools, by its chat template or the operator."""

import json
from collections.abc import Collection
from dataclasses import dataclass

from moonserve.gateway.text.harmony import FINAL, THINKING, HarmonyParser
from moonserve.gateway.text.message_parser import ContentParser, MessageParser
from moonserve.gateway.text.reasoning import TAGS, ReasoningParser, ReasoningTags
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.gateway.text.tool_call_parsers import HARMONY, CallSyntax, detect, select_syntax

REASONING_PARSERS = ("think", "harmony")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSyntax:
    """Parsers and grammars of one model's messages."""

    tokenizer: Tokenizer
    calls: CallSyntax | None  # None = not parsed
    reasoning: ReasoningTags | None  # None = not parsed, or in channels
    has_channels: bool

    @property
    def keeps_special_tokens(self) -> bool:
        """True if reasoning cannot be recognised in text without special tokens."""
        return self.has_channels or (self.reasoning is not None and self.tokenizer.is_special(self.reasoning.closing))

    def parser(self, prompt: str, names: Collection[str] | None, *, is_eager: bool) -> MessageParser | None:
        """Returns a new parser of the message that follows a prompt; None if all of it is content. `names`: functions
        that are offered; None = calls are not parsed."""
        if self.has_channels:
            parser: MessageParser = HarmonyParser(names or (), is_eager=is_eager)
        elif names is not None and self.calls is not None:
            parser = self.calls.parser(names, is_eager=is_eager)
        elif self.reasoning is not None:
            parser = ContentParser()
        else:
            return None
        if self.reasoning is not None:
            parser = ReasoningParser(self.reasoning, parser)
        parser.start(prompt)
        return parser

    def with_reasoning(self, grammar: str, prompt: str, *, has_calls: bool) -> str:
        """Returns a grammar of messages in which reasoning may precede what the grammar describes. `has_calls`: it
        includes calls of tools."""
        if self.has_channels:
            final = "" if has_calls else FINAL
            return f"%llguidance {{}}\nstart: {THINKING} {final} answer\nanswer: %lark {{\n{grammar}\n}}"
        if self.reasoning is None:
            return grammar
        is_token = self.tokenizer.added_token_id(self.reasoning.closing) is not None
        return self.reasoning.before_grammar(grammar, prompt, self.tag_rule, is_token=is_token)

    def tag_rule(self, tag: str) -> str:
        """Returns the rule of a tag, in the language of `protocol.grammar`: its token, or else its text."""
        token_id = self.tokenizer.added_token_id(tag)
        return json.dumps(tag) if token_id is None else f"<[{token_id}]>"


def select(reasoning_parser: str, tool_call_parser: str, tokenizer: Tokenizer) -> MessageSyntax:
    """Returns the syntax for --reasoning-parser, --tool-call-parser and the model's chat template."""
    template = tokenizer.template_source
    calls = select_syntax(tool_call_parser, template)
    is_auto = reasoning_parser == "auto"
    has_channels = HARMONY in (calls, detect(template) if is_auto else None) or reasoning_parser == "harmony"
    tags = next((tags for tags in TAGS if tags.closing in (template or "")), None if is_auto else TAGS[0])
    if has_channels or reasoning_parser == "none":
        tags = None
    return MessageSyntax(tokenizer=tokenizer, calls=calls, reasoning=tags, has_channels=has_channels)
