"""The formats of tool calls, one a module, and what several of them share: JSON, values between tags."""
