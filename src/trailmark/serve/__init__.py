"""An OpenAI-compatible server around the local engine. `body` reads requests, `growing` settles streamed text, `answers` writes replies,
`service` and `app` tie them to the engine, `aside` keeps all of that off the event loop, `door` is about connections, `home` and
`speech` are what is known of the run that is served, `command` is `trailmark serve`."""
