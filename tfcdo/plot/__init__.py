"""Pictures: copy trees and what the links carry, and what the bench measured."""
