"""Parse requests of the providers' APIs and render replies; `DIALECTS` lists every format that the proxy serves."""

from polar_trl.wire.anthropic import Anthropic
from polar_trl.wire.base import Dialect
from polar_trl.wire.google import Google
from polar_trl.wire.openai_chat import OpenAIChat
from polar_trl.wire.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAIResponses(), Anthropic(), Google())
