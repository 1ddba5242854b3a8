"""An OpenAI-compatible server around the local engine. `body` reads requests, `growing` settles streamed text, `answers`
writes replies, `app` ties them to the engine, `command` is `trailmark serve`."""
