"""ficco inside other packages. Each module imports its client, and nothing else imports them."""
