// What one leg leaves in its folder for the comparison: bytes, logits, and numbers by name.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

using Bytes = std::vector<uint8_t>;
using Logits = std::vector<float>;

inline Bytes read_file(const std::filesystem::path &path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + path.string());
    return Bytes(std::istreambuf_iterator<char>(in), {});
}

inline void write_file(const std::filesystem::path &path, const void *data, size_t size) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(static_cast<const char *>(data), static_cast<std::streamsize>(size));
    if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

// A slot file without the identity and the checksums that the adapter writes behind the memory state.
inline Bytes without_checksums(Bytes file) {
    struct { char tag[4]; uint32_t len; uint32_t size[2]; uint32_t crc32c; } end;  // the last record, and the last checksum
    if (file.size() < sizeof end) return file;
    std::memcpy(&end, file.data() + file.size() - sizeof end, sizeof end);
    if (std::memcmp(end.tag, "SIZE", 4) == 0 && end.size[0] <= file.size()) file.resize(file.size() - end.size[0]);
    return file;
}

class Results {
public:
    explicit Results(std::filesystem::path folder) : folder_(std::move(folder)) {
        std::ifstream in(folder_ / "numbers");
        std::string name;
        for (long long value; in >> name >> value;) numbers_[name] = value;
    }

    const std::filesystem::path &folder() const { return folder_; }

    void put(const std::string &name, const Bytes &bytes) const {
        write_file(folder_ / (name + ".bin"), bytes.data(), bytes.size());
    }
    void put(const std::string &name, const Logits &logits) const {
        write_file(folder_ / (name + ".f32"), logits.data(), logits.size() * sizeof(float));
    }
    // Written at once: what a leg did before it died is there.
    void put(const std::string &name, long long value) {
        numbers_[name] = value;
        std::ofstream(folder_ / "numbers", std::ios::app) << name << ' ' << value << '\n';
    }

    bool has(const std::string &name) const { return std::filesystem::exists(folder_ / (name + ".bin")); }
    Bytes bytes(const std::string &name) const { return read_file(folder_ / (name + ".bin")); }
    Logits logits(const std::string &name) const {
        const Bytes raw = read_file(folder_ / (name + ".f32"));
        const auto *first = reinterpret_cast<const float *>(raw.data());
        return Logits(first, first + raw.size() / sizeof(float));
    }
    long long number(const std::string &name) const {
        const auto it = numbers_.find(name);
        if (it == numbers_.end()) throw std::runtime_error("no number " + name + " in " + folder_.string());
        return it->second;
    }
    const std::map<std::string, long long> &numbers() const { return numbers_; }

private:
    std::filesystem::path folder_;
    std::map<std::string, long long> numbers_;
};
