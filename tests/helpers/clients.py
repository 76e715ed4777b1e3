"""One client per format, as agents write them: a request in normal form to the body that such an agent sends, replies
to the history that it sends next. Shares no code with the package's readers and writers.

Each says in `carry` what its format cannot say. Reads replies strictly: an event that the format does not know fails.
"""

from client_anthropic import AnthropicClient
from client_base import Client, Seen
from client_google import GoogleClient
from client_openai_chat import ChatClient
from client_openai_responses import ResponsesClient

__all__ = ["CLIENTS", "Client", "Seen"]

CLIENTS: dict[str, type[Client]] = {
    client.dialect_name: client for client in (ChatClient, ResponsesClient, AnthropicClient, GoogleClient)
}
