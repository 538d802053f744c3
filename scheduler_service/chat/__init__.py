"""What models write in chats: calls of tools, and reasoning before the answer. Pure: text in, events out."""
