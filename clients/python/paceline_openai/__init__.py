"""The OpenAI API of Paceline: an ASGI application that is a client of schedulers, and nothing else.

    from paceline.aio import Client
    from paceline_openai import Gateway

    app = Gateway(Client("127.0.0.1:50051"))  # for a server of your own; make it in its event loop

`paceline serve --openai PORT` starts it beside a stack, `paceline gateway ADDRESS...` before others.
"""

from paceline_openai.app import Gateway
from paceline_openai.settings import Bounds

__all__ = ["Bounds", "Gateway"]
