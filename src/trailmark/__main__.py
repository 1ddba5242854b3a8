from trailmark.commands.app import main

main()
