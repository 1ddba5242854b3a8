"""An OpenAI-compatible server around the local engine. `body` reads requests, `growing_text` settles streamed text,
`answers` writes replies, `service` and `app` connect them to the engine, `threads` keeps work off the event loop, and
`connections` limits connections. `run_settings` and `prompt_format` hold what the served run says about itself."""
