"""The same library behind other projects' signatures."""
