// Holds the legs of a case against each other and against kvstate alone.

#pragma once

#include "cases.hpp"
#include "results.hpp"

#include <string>

// Prints a line for each comparison, and counts.
class Report {
public:
    explicit Report(std::string name) : name_(std::move(name)) {}

    // Both values are printed when they differ.
    template <typename A, typename B>
    void equal(const std::string &what, const A &is, const B &should) {
        line(is == static_cast<A>(should), what, std::to_string(is), std::to_string(should));
    }
    void equal(const std::string &what, const Bytes &is, const Bytes &should);
    void holds(const std::string &what, bool ok, const std::string &is, const std::string &should) {
        line(ok, what, is, should);
    }

    int passed() const { return passed_; }
    int failed() const { return failed_; }

private:
    void line(bool ok, const std::string &what, const std::string &is, const std::string &should);

    std::string name_;
    int passed_ = 0;
    int failed_ = 0;
};

struct Legs {
    Results stock, adapter;                          // each with its own states
    Results stock_took_adapter, adapter_took_stock;  // round_trip only: each with the other's
};

void compare_stock(const Case &the_case, const Results &stock, Report &report);
void compare_legs(const Case &the_case, const Legs &legs, Report &report);
