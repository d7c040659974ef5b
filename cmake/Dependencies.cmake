# The system's libraries, as targets that the rooms link. The Debian packages behind them: deps/debian-packages.txt.

set(OPENSSL_USE_STATIC_LIBS ${LINKCPP_WORKER_ONLY})

find_package(Threads REQUIRED)
find_package(OpenSSL 3 REQUIRED)
find_package(CURL REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)

if(NOT LINKCPP_WORKER_ONLY)
  # cpp-httplib comes compiled, and brings the definitions that its header must be read with.
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(httplib REQUIRED IMPORTED_TARGET cpp-httplib)
  add_library(httplib::httplib ALIAS PkgConfig::httplib)
endif()

# Compiled: it has no state, and every file that formats a message would compile it again. Debian has no static library.
set(LINKCPP_FMT fmt::fmt)
if(LINKCPP_WORKER_ONLY)
  set(LINKCPP_FMT fmt::fmt-header-only)
endif()

# Header-only, with a logger of our own: the plugin lives in processes that are not ours, and spdlog's registry is one a
# process.
set_target_properties(spdlog::spdlog_header_only PROPERTIES
                      INTERFACE_LINK_LIBRARIES "${LINKCPP_FMT};Threads::Threads")

if(BUILD_TESTING)
  find_package(GTest REQUIRED)
endif()
find_package(benchmark) # bench/ is built where it is found
