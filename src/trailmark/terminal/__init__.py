"""What commands share: options, tables, the line of JSON."""
