"""The decode service: reads blocks and states, decodes, and streams tokens to routers."""
