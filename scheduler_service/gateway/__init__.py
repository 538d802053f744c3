"""The scheduler as a worker of the `smg` gateway, which has the OpenAI API. For --gateway-port alone."""
