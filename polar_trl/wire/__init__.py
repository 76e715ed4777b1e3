"""Wire formats: request and reply bodies to and from normal form. `DIALECTS` is every one that the proxy serves."""

from polar_trl.wire.anthropic import Anthropic
from polar_trl.wire.base import Dialect
from polar_trl.wire.google import Google
from polar_trl.wire.openai_chat import OpenAIChat
from polar_trl.wire.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAIResponses(), Anthropic(), Google())
