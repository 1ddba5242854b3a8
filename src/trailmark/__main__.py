from trailmark.cli import main

main()
